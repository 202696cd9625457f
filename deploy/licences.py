"""Write deploy/locks/LICENCES.md: the licence of every package in an image, from its own metadata.

    python -m pip install --no-deps --target FOLDER -r deploy/locks/torch.txt && python deploy/licences.py FOLDER

deploy/locks.sh runs both. A package whose metadata name no licence that is known here ends it: read it, and add it to a table below.
"""

import re
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path

LOCKS = Path(__file__).with_name("locks")
IMAGES = {"slim": "run.txt", "full": "checkpoint.txt", "torch": "torch.txt"}
KNOWN = frozenset(["0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "MIT", "PSF-2.0", "Zlib"])
"""Licences (SPDX) under which an image may be handed on, with their texts, as wheels bring them along."""
_SPDX = {
    "Apache License 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "3-Clause BSD License": "BSD-3-Clause",
    "MIT License": "MIT",
}
"""What metadata say otherwise. "BSD" was looked up for each package that says no more."""


def locked(name: str) -> dict[str, str]:
    """Package and version of each line of a lock."""
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", (LOCKS / name).read_text(encoding="utf-8"), re.MULTILINE))


def licence_of(package: Distribution) -> str:
    """The licence that a package's metadata name, as an SPDX expression; "" where they name none that is known."""
    said = package.metadata
    classifiers = [text.rpartition(" :: ")[2] for text in said.get_all("Classifier", []) if text.startswith("License :: ")]
    for given in (said.get("License-Expression"), said.get("License"), *classifiers):
        expression = _SPDX.get(given or "", given or "")
        if expression and is_known(expression):
            return expression
    return ""


def is_known(expression: str) -> bool:
    """Whether every licence of an SPDX expression is known here.

    Example:
        >>> is_known("MIT AND (BSD-3-Clause OR 0BSD)"), is_known("GPL-3.0-only")
        (True, False)
    """
    return {word for word in re.split(r"[\s()]+", expression) if word not in ("", "AND", "OR")} <= KNOWN


def page(packages: Iterable[Distribution]) -> str:
    """The file's text.

    Raises:
        SystemExit: a package of a lock is not there, or its licence is not known.
    """
    found = {package.metadata["Name"].lower().replace("_", "-"): licence_of(package) for package in packages}
    locks = {image: locked(lock) for image, lock in IMAGES.items()}
    rows, unknown = [], []
    for name, version in sorted(locks["torch"].items()):
        images = ", ".join(image for image, lock in locks.items() if name in lock)
        rows.append(f"| {name} | {version} | {found.get(name, '')} | {images} |")
        unknown += [] if found.get(name) else [name]
    if unknown:
        sys.exit(f"licences: none known of {', '.join(unknown)}")
    return "\n".join([_HEAD, *rows, ""])


_HEAD = """\
# Licences of what an image holds

Written by deploy/licences.py from the packages' metadata. kvemb itself, all that a wheel of it holds, is under Apache-2.0. Each
package brings its licence along, in its `.dist-info` under /opt/kvemb. An image with PyTorch has torch besides (BSD-3-Clause;
`--build-arg TORCH`), and each image its base: Python (PSF-2.0) and Debian's packages, whose licences are in /usr/share/doc there.
Libraries in binary wheels (OpenBLAS and libgfortran in numpy, with the GCC exception; those of pyarrow) have theirs among the same
files.

| package | version | licence | images |
|---|---|---|---|"""

if __name__ == "__main__":
    text = page(distributions(path=[sys.argv[1]]))
    (LOCKS / "LICENCES.md").write_text(text, encoding="utf-8")
