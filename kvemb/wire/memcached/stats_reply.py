"""Reader of memcached's `stats`: lines of a name and a value, until END. Pure."""

from dataclasses import dataclass, field

from kvemb.errors import ProtocolError
from kvemb.wire.buffer_scan import EOL, Bytes, is_error, take_line
from kvemb.wire.replies import ReplyReader

_MOST_LINES = 1 << 14


@dataclass(eq=False)
class StatsReply(ReplyReader):
    """What a server says of itself, as text; `error` for an error in its place."""

    fields: dict[str, str] = field(default_factory=dict)
    error: bytes | None = None
    done: bool = False

    def take(self, data: Bytes) -> int:
        line = take_line(data, 0)
        if line is None:
            return 0
        self._note(line)
        return len(line) + len(EOL)

    def _note(self, line: bytes) -> None:
        word, _, rest = line.decode("utf-8", "replace").partition(" ")
        name, _, value = rest.partition(" ")
        if line == b"END" or is_error(line):
            self.error = line if is_error(line) else None
            self.done = True
        elif word == "STAT" and name and len(self.fields) < _MOST_LINES:
            self.fields[name] = value
        else:
            raise ProtocolError(f"reply {line[:40]!r}, expected a line of `stats`")
