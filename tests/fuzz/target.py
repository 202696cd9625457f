"""Targets of attacks: each takes one input after the other, and raises an AssertionError where something is wrong."""

import random
from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.fuzz.honest import Honest


class Target(ABC):
    """Something that takes bytes; a context manager.

    Args:
        folder: for its files.
        chance: where every choice comes from.
    """

    name = ""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.stack = ExitStack()
        self.honest: Honest | None = None
        self.pids: dict[str, int] = {}
        """Whose memory is measured."""
        self.logs: list[Path] = []
        """Where a shard would tell of an error of its own making."""

    def __enter__(self) -> "Target":
        with ExitStack() as on_failure:
            on_failure.callback(self.stack.close)
            self.start()
            on_failure.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    @abstractmethod
    def start(self) -> None:
        """Start the attacked process, and the trainer beside it."""

    @abstractmethod
    def seeds(self) -> list[bytes]:
        """Return what inputs are made of."""

    @abstractmethod
    def change(self, seed: bytes) -> bytes:
        """Return an input."""

    @abstractmethod
    def attack(self, data: bytes) -> None:
        """Give it an input.

        Raises:
            AssertionError: its behaviour was wrong.
        """

    def beside(self, source: Any) -> None:
        """Let an honest trainer train."""
        self.honest = self.stack.enter_context(Honest(source))

    def check(self) -> None:
        """Look whether all are well.

        Raises:
            AssertionError: one is not.
        """
        if self.honest is not None:
            self.honest.check()
        for log in self.logs:
            text = log.read_text(errors="replace")
            assert "Traceback" not in text, f"{log.name}: {text[text.index('Traceback') - 300 :][:3000]}"
