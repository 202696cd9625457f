"""Build the site into .docs/site, and look at every page: `make docs`. Warnings, dead links and addresses outside of the site are errors.

Run by a Python that has the extra `docs`; kvemb itself and frameworks need not be installed.
"""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / ".docs/site"
_STYLE_ADDRESS = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')\s]+)")


class Page(HTMLParser):
    """What a page names: its anchors, the addresses it links to, the addresses that a browser loads with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: list[str] = []
        self.loads: list[str] = _STYLE_ADDRESS.findall(text)
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag's anchor and addresses."""
        given = {name: value or "" for name, value in attrs}
        self.anchors.add(given.get("id", ""))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag != "a":
            self.loads += [given[name] for name in ("src", "href", "data", "poster") if name in given]


def faults(site: Path) -> Iterator[str]:
    """Yield every dead link, and every address outside of the site that a browser would ask for."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(site)
        for address in {*page.links, *page.loads}:
            to = urlsplit(address)
            if to.scheme or to.netloc:
                if address in page.loads and to.scheme != "data":
                    yield f"{name} loads {address}"
                continue
            target = (path.parent / unquote(to.path)).resolve() if to.path else path
            if not target.exists() or (target in pages and unquote(to.fragment) not in pages[target].anchors):
                yield f"{name} leads to {address}, which is not there"
    for path in sorted(site.rglob("*.css")):
        for address in _STYLE_ADDRESS.findall(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site)} loads {address}"


def main() -> int:
    """Build, look, and say how long it took and how large the site is."""
    began = time.monotonic()
    shutil.rmtree(SITE, ignore_errors=True)
    words = ["-q", "-j", "auto", "--fail-on-warning", "-c", f"{ROOT}/docs/site", "-d", f"{ROOT}/.docs/read", str(ROOT), str(SITE)]
    if subprocess.run([sys.executable, "-m", "sphinx", "--fresh-env", *words], check=False).returncode:
        print("docs: the site was not built; every warning above is an error. A new page goes into the navigation in docs/index.md")
        return 1
    found = list(faults(SITE))
    print(*found, sep="\n", end="\n" if found else "")
    size = sum(path.stat().st_size for path in SITE.rglob("*") if path.is_file())
    n_pages = len(list(SITE.rglob("*.html")))
    print(f"docs: {n_pages} pages, {size / 1e6:.1f} MB, {time.monotonic() - began:.0f} s: {SITE / 'index.html'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
