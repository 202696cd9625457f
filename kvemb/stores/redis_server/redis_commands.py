"""Commands to one Redis or Valkey server, and their answers: connecting, authentication, a few commands at a time. No rows.

Everything takes its time from one deadline, whatever the server sends, and ends with a value or an error of ours. The server may be another
than was expected. Which questions are asked, and what the answers mean, is in `kvemb.stores.redis_server.redis_admin`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvemb.config import StorageConfig
from kvemb.errors import ProtocolError
from kvemb.net.deadline import Deadline
from kvemb.net.exchange import round_trip
from kvemb.net.link import Connect, Link, connect_link
from kvemb.stores.node_batch import server_error
from kvemb.wire.resp.resp_codec import command
from kvemb.wire.resp.resp_value import ErrorLine, Value, ValueReply

Word = str | bytes | int
MAX_VALUE_BYTES = 512 << 20  # proto-max-bulk-len's default


@dataclass(frozen=True)
class RedisAccess:
    """How Redis servers are reached: credentials, and a function that opens a connection.

    Args:
        config: the storage section, for its credentials.
        connect: opens connections.
    """

    config: StorageConfig
    connect: Connect = connect_link


def open_admin(address: str, access: RedisAccess, deadline: Deadline, name: str = "") -> Link:
    """Connect and authenticate.

    Args:
        address: "host:port".
        access: credentials, and how to connect.
        deadline: of all of it.
        name: of the connection on the server, "" for none.

    Raises:
        NodeUnavailableError: no connection, or no answer in time.
        NodeRefusesError: the credentials were refused.
        ProtocolError: this is no Redis or Valkey server.
    """
    config, link = access.config, access.connect(address, deadline)
    try:
        if config.password is not None:
            ask(link, deadline, "AUTH", *([config.username] if config.username else []), config.password)
        if name:
            ask(link, deadline, "CLIENT", "SETNAME", name)
    except BaseException:
        link.close()
        raise
    return link


@contextmanager
def admin(address: str, access: RedisAccess, deadline: Deadline) -> Iterator[Link]:
    """The same for the length of a `with` block."""
    link = open_admin(address, access, deadline)
    try:
        yield link
    finally:
        link.close()


def ask(link: Link, deadline: Deadline, *words: Word) -> Value:
    """Run one command.

    Raises:
        KvembError: as `open_admin`; or the server's error, by its meaning (`server_error`).
    """
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
    """Return a reply that is to be text.

    Raises:
        ProtocolError: it is something else.
    """
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


def _bytes(word: Word) -> bytes:
    return word if isinstance(word, bytes) else str(word).encode()
