"""A notebook as Markdown: its text, its code, and what each cell printed and drew."""

import json
from collections.abc import Iterator, Mapping
from typing import Any


def as_markdown(text: str) -> str:
    """Return the Markdown of a notebook of nbformat 4; pictures are in it, as data.

    Example:
        >>> cell = {"cell_type": "code", "source": "1 + 1", "outputs": [{"output_type": "execute_result", "data": {"text/plain": "2"}}]}
        >>> print(as_markdown(json.dumps({"cells": [cell]})))
        ```python
        1 + 1
        ```
        <BLANKLINE>
        ```text
        2
        ```
    """
    return "\n\n".join(part for cell in json.loads(text)["cells"] for part in _cell(cell))


def _cell(cell: Mapping[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            yield f'<img alt="what the cell above draws" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
        elif said := "".join(output.get("text", data.get("text/plain", ""))).strip():
            yield f"```text\n{said}\n```"
