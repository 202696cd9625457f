"""What `distribute` gives back, in every framework."""

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvemb.api.table import Table


@dataclass(frozen=True, eq=False, kw_only=True)
class Distributed:
    """The result of `distribute`; its text is the report.

    Args:
        tables: made or opened, in the model's order.
        lines: of the text.
    """

    tables: tuple["Table", ...]
    lines: tuple[str, ...] = field(repr=False)

    def report(self, *, quiet: bool) -> None:
        """Write the text to stderr."""
        if not quiet:
            print(self, file=sys.stderr)

    def __str__(self) -> str:
        return "\n".join(self.lines)
