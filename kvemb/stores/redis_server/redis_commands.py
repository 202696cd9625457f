"""Commands to one Redis or Valkey server, a few at a time, and their answers; those about slots not served here, or not now.

No rows. Everything takes its time from one deadline, whatever the server sends, and ends with a value or an error of ours. The server may
be another than was expected. How a connection is made is in `redis_login`; what is asked, and what the answers mean, in `redis_admin`.
"""

from collections.abc import Sequence

from kvemb.errors import NodeUnavailableError, ProtocolError
from kvemb.net.deadline import Deadline
from kvemb.net.exchange import round_trip
from kvemb.net.link import Link
from kvemb.stores.server_errors import server_error
from kvemb.wire.resp.resp_codec import command
from kvemb.wire.resp.resp_value import ErrorLine, Value, ValueReply

Word = str | bytes | int
NOT_NOW = (b"-TRYAGAIN", b"-CLUSTERDOWN", b"-LOADING", b"-MASTERDOWN")
REDIRECTS = (b"-MOVED", b"-ASK", *NOT_NOW)


def ask(link: Link, deadline: Deadline, *words: Word) -> Value:
    """Run one command."""
    (value,) = ask_all(link, [words], deadline)
    if isinstance(value, ErrorLine):
        raise server_error(link.address, value.line)
    return value


def ask_all(link: Link, commands: Sequence[Sequence[Word]], deadline: Deadline) -> list[Value]:
    """Run commands in one round trip; errors are values here."""
    replies = [ValueReply() for _ in commands]
    round_trip(link, b"".join(command(*(_bytes(word) for word in words)) for words in commands), replies, deadline)
    return [reply.value for reply in replies]


def text_of(link: Link, value: Value, command_name: str) -> str:
    """Return a reply that is to be text."""
    if not isinstance(value, bytes):
        raise ProtocolError(
            f"node {link.address}: {command_name} answered {shown(value)}, expected text; is this a Redis or Valkey server?"
        )
    return value.decode("utf-8", "replace")


def number_of(link: Link, value: Value, command_name: str) -> int:
    """Return a reply that is to be a number. Raises as `text_of`."""
    if not isinstance(value, int):
        raise ProtocolError(f"node {link.address}: {command_name} answered {shown(value)}, expected a number")
    return value


def shown(value: Value) -> str:
    """The beginning of an answer, for messages."""
    return repr(value)[:60]


NO_HOST = (
    ": cluster-preferred-endpoint-type is hostname there, and the node at this port has none. Give it one (CONFIG SET "
    "cluster-announce-hostname), or say CONFIG SET cluster-preferred-endpoint-type ip on every node"
)


def redirect_target(line: bytes, asked: str) -> str:
    """The "host:port" of `-ASK 3999 host:port`; an empty host means the node that was asked."""
    target = (*line.decode("utf-8", "replace").split(" "), "", "")[2]
    host, _, port = target.rpartition(":")
    if not (port.isascii() and port.isdigit() and len(port) <= 5) or host == "?":
        raise NodeUnavailableError(f"node {asked}: redirects to {target!r}, which is no address{NO_HOST if host == '?' else ''}")
    return target if host else f"{asked.rpartition(':')[0]}:{port}"


def _bytes(word: Word) -> bytes:
    return word if isinstance(word, bytes) else str(word).encode()
