"""One thing that is wrong, or will be, and what to do about it. Pure."""

from dataclasses import dataclass

ERROR, WARNING = "error", "warning"


@dataclass(frozen=True)
class Finding:
    """What the doctor found.

    Args:
        name: of the kind of finding, for scripts: it does not change.
        level: ERROR: rows or pushes are in danger, or nothing goes on. WARNING: that may come, or it costs more than it need.
        where: node, shard or file.
        what: is the matter.
        mend: what to do.
    """

    name: str
    level: str
    where: str
    what: str
    mend: str


def error(name: str, where: str, what: str, mend: str) -> Finding:
    """Make a finding that cannot wait."""
    return Finding(name, ERROR, where, what, mend)


def warning(name: str, where: str, what: str, mend: str) -> Finding:
    """Make one that can."""
    return Finding(name, WARNING, where, what, mend)
