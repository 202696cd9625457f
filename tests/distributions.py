"""Are the built files what strangers are to get? `python distributions.py WHEEL WHEEL_FROM_SDIST SDIST`, in .ci/wheel.

The wheel from the source distribution has the same files, byte by byte. The version is pyproject.toml's, and each link of the description
leads somewhere. Operators find their files, and nothing that is for the repository only is inside.
"""

import re
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOR_OPERATORS = ("monitoring/alerts.yml", "monitoring/dashboard.json", "helm/kvemb/Chart.yaml", "helm/examples/memcached.yaml")
IN_SDIST = ("docker-compose.yml", "deploy/Dockerfile", "deploy/locks/run.txt", "deploy/kvemb.yaml", "docs/upgrade.md", "CHANGELOG.md")


def wrong(wheel: Path, again: Path, sdist: Path) -> list[str]:
    """Return what is not as it should be."""
    files = contents(wheel)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    metadata = Parser().parsestr(files[f"kvemb-{version}.dist-info/METADATA"].decode())
    found = [f"{name}: not the same in both wheels" for name in files.keys() ^ contents(again).keys()]
    found += [
        f"{name}: other bytes in the source distribution's wheel" for name, data in contents(again).items() if files.get(name) != data
    ]
    found += [f"the description links to {link}" for link in re.findall(r"\]\(([^)]*)\)", metadata.get_payload()) if "://" not in link]
    found += (
        [] if metadata["Version"] == version and len(metadata.get_payload()) > 5000 else ["METADATA: another version, or no description"]
    )
    data = f"kvemb-{version}.data/data/share/kvemb/"
    found += [f"{name}: missing in the wheel" for name in FOR_OPERATORS if data + name not in files]
    found += [
        f"{name}: does not belong into the wheel" for name in files if not re.match(r"kvemb(/|-[^/]*\.dist-info/|-[^/]*\.data/)", name)
    ]
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    return found + [f"{name}: missing in the source distribution" for name in IN_SDIST if name not in names]


def contents(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel, but its list of them."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


if __name__ == "__main__":
    made = [Path(name) for name in sys.argv[1:]]
    if problems := wrong(*made):
        sys.exit("\n".join(problems))
    print("; ".join(f"{one.name}: {one.stat().st_size:,} bytes" for one in (made[0], made[2])))
