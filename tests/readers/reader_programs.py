"""The readers of examples/readers, built, and run: a line of ids in, a line of JSON for each id out."""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "readers"
LANGUAGES = ("c", "go", "java", "js")
LOST_NODE, STALE_MAP, WRONG_RECORD = 3, 4, 5
PATIENCE_S = 60.0
_DEBIAN = {  # language: programs, and a file of its libraries (none for npm's)
    "c": (("cc",), "/usr/include/hiredis/hiredis.h", "gcc libhiredis-dev libssl-dev"),
    "go": (
        ("go",),
        "/usr/share/gocode/src/github.com/gomodule/redigo",
        "golang-go golang-github-gomodule-redigo-dev golang-golang-x-crypto-dev",
    ),
    "java": (("javac", "java"), "/usr/share/java/bcprov.jar", "default-jdk-headless libbcprov-java"),
    "js": (("node",), str(ROOT / ".readers" / "node_modules" / "redis"), "nodejs npm, then npm install (scripts/readers.sh)"),
}


def why_not(language: str) -> str:
    """Say what is missing to build a reader; "" for nothing."""
    programs, library, packages = _DEBIAN[language]
    missing = [program for program in programs if shutil.which(program) is None] + ([] if Path(library).exists() else [library])
    return f"{', '.join(missing)}: not installed; `make readers` installs {packages}" if missing else ""


def built(language: str, out: Path) -> list[str]:
    """Build a reader into a folder and return its command."""
    library, source = _DEBIAN[language][1], FOLDER / language
    if language == "c":
        flags = ["-O1", "-g", "-std=gnu17", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined"]
        run(["cc", *flags, "-o", str(out / "reader"), str(source / "reader.c"), "-lhiredis", "-lcrypto", "-lm"])
        return [str(out / "reader")]
    if language == "go":
        env = {"GO111MODULE": "off", "GOPATH": "/usr/share/gocode", "GOCACHE": str(out / "cache"), "GOFLAGS": ""}
        run(["go", "build", "-o", str(out / "reader"), str(source / "reader.go")], env)
        return [str(out / "reader")]
    if language == "java":
        run(["javac", "-cp", library, "-d", str(out), str(source / "Reader.java")])
        return ["java", "-XX:TieredStopAtLevel=1", "-cp", f"{out}:{library}", "Reader"]
    for name in ("reader.js", "package.json"):
        shutil.copy(source / name, out)
    (out / "node_modules").symlink_to(Path(library).parent)
    return ["node", str(out / "reader.js")]


def run(command: Sequence[str], env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})}, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


class RunningReader:
    """A reader's process, which keeps connections and cluster map from batch to batch; a context manager.

    Args:
        command: as `built` returns it.
        addresses: of some nodes.
        table: its name.
        log: file for what it says on stderr.
        patience_s: how long a batch may take.
    """

    def __init__(self, command: Sequence[str], addresses: Sequence[str], table: str, log: Path, patience_s: float = PATIENCE_S) -> None:
        self._log = log
        pipe, whole = subprocess.PIPE, [*command, ",".join(addresses), table, str(patience_s)]
        with log.open("wb") as said:
            # Java reads its words by the locale.
            self._process = subprocess.Popen(
                whole, stdin=pipe, stdout=pipe, stderr=said, text=True, env={**os.environ, "LC_ALL": "C.UTF-8"}
            )

    def __enter__(self) -> "RunningReader":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_S)
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]  # both are pipes

    def send(self, ids: Sequence[int]) -> None:
        """Give it a batch."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, ids)) + "\n")
        self._process.stdin.flush()

    def ask(self, ids: Sequence[int], *, sent: bool = False) -> list[dict[str, Any]]:
        """Return what it says of a batch, which it may have been given before; fewer lines where it has ended."""
        if not sent:
            self.send(ids)
        assert self._process.stdout is not None
        lines = [line for _ in ids if (line := self._process.stdout.readline())]
        return [json.loads(line) for line in lines]

    def said(self) -> str:
        """What stood on stderr so far."""
        return self._log.read_text(encoding="utf-8")

    def end(self) -> int:
        """Close its stdin and return its exit code."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(PATIENCE_S)
