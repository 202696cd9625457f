"""How Sphinx makes the site from the Markdown files of the repository: `make docs`.

The source folder is the repository itself, so that a link that works there works in the site. A page stands in the navigation of
docs/index.md, or the build fails and names it.
"""

import re
import sys
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

from notebook import as_markdown  # noqa: E402 (found beside this file)
from reference import Reference  # noqa: E402

project = "kvemb"
author = "The kvemb authors"
project_copyright = f"2026, {author}"
release = version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]

extensions = ["myst_parser", "sphinx_copybutton"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
root_doc = "docs/index"
include_patterns = ["docs/**", "benchmarks/RESULTS.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples/readers/README.md"]
# Folders that no page can be in, so that they are not searched.
exclude_patterns = [".*", "build", "kvemb", "paramserver", "trainer", "tests", "deploy", "scripts", "docs/site"]
myst_enable_extensions = ["fieldlist"]
myst_heading_anchors = 5
highlight_language = "text"
pygments_dark_style = "github-dark"
python_use_unqualified_type_names = True
maximum_signature_line_length = 90
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"kvemb {release}"
html_static_path = ["static"]
html_css_files = ["kvemb.css"]
html_extra_path = ["extra"]
html_search_scorer = str(HERE / "search_scorer.js")
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}

_README = re.compile(r"^<!-- README to (.+?) -->$", re.MULTILINE)
_NAMED_BY_FILE = re.compile(r"\[[\w./-]+\.md\](?=\([^)\s]+\.md[#)])")
_LINK = re.compile(r"(\]\()(?!https?:|#)")


def _from_readme(part: re.Match[str]) -> str:
    """README.md up to a heading, with its links as they are from docs/."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = text[: text.index(f"\n{part[1]}\n") + 1]
    text = text.replace("\n\n```\n", "\n```\n")  # the blank line that ends an example for doctest
    return _LINK.sub(r"\1../", text).replace("](../docs/", "](")


def setup(app: Sphinx) -> None:
    """Fill in what pages name in a comment: parts of README.md, and the reference of a module or of the command; read notebooks."""
    reference = Reference(ROOT)

    def fill(_: Sphinx, page: str, source: list[str]) -> None:
        if page.startswith("docs/tutorials/"):
            source[0] = as_markdown(source[0])
            return
        text = reference.fill(_README.sub(_from_readme, source[0]), page)
        source[0] = _NAMED_BY_FILE.sub("[]", text)  # the repository names a file, the site its title

    app.add_source_suffix(".ipynb", "markdown")
    app.connect("source-read", fill)
