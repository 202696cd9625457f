"""What pyproject.toml cannot say: which packages are installed, and as what; what lies beside them; the description without dead links.

`trainer` and `paramserver` go inside of kvemb, because programs and other distributions have packages of these names: see kvemb/own.
Alert rules, dashboards and the Helm chart go to share/kvemb of the environment. A package index does not have the repository's files: links
to them are plain text there.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

OWN = ("paramserver", "trainer")
SHARED = ("monitoring", "helm")
_HERE = Path(__file__).resolve().parent
_ELSEWHERE = r"\]\((?!https?://|#)[^()\s]+\)"
_IMAGE, _LINK = re.compile(rf"!\[[^][]*{_ELSEWHERE}\n*"), re.compile(rf"\[([^][]+){_ELSEWHERE}")


def described() -> str:
    """The README, with the words of each relative link in its place, and without pictures."""
    return _LINK.sub(r"\1", _IMAGE.sub("", (_HERE / "README.md").read_text(encoding="utf-8")))


def shared() -> list[tuple[str, list[str]]]:
    """What operators need, by the folder that it is installed into; nothing where an image is built, which does not have it."""
    found = sorted(path.relative_to(_HERE) for name in SHARED for path in (_HERE / "deploy" / name).rglob("*") if path.is_file())
    kept = [path for path in found if path.suffix not in (".pyc", ".py")]
    folders = sorted({path.parent for path in kept})
    return [(f"share/kvemb/{folder.relative_to('deploy')}", [str(path) for path in kept if path.parent == folder]) for folder in folders]


if __name__ == "__main__":
    inside = [f"kvemb.own.{name}" for top in OWN for name in (top, *(f"{top}.{below}" for below in find_packages(top)))]
    setup(
        packages=[*find_packages(include=["kvemb", "kvemb.*"]), *inside],
        package_dir={f"kvemb.own.{top}": top for top in OWN},
        data_files=shared(),
        long_description=described(),
        long_description_content_type="text/markdown",
    )
