"""Small values of Redis and Valkey, changed on a condition and read wherever their slot is; and values in the place of pages, mended.

The condition is a script of two commands. A Redis Cluster has a marker in each of thousands of slots, and WATCH would take a round trip for
each: minutes on a loaded machine. Markers are changed when a node is repaired, never while rows are read and written.
"""

from collections.abc import Sequence

from kvemb.errors import NodeRefusesError, NodeUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.net.exchange import round_trip
from kvemb.schema.keys import Containers
from kvemb.stores.redis_server.redis_commands import Word, ask_all, redirect_target
from kvemb.stores.redis_server.redis_login import RedisAccess, logged_in, run_id_of
from kvemb.stores.server_errors import server_error
from kvemb.wire.replies import FOREIGN, MAX_BLOB_BYTES, BlobReply, LineReply
from kvemb.wire.request_arrays import chunks
from kvemb.wire.resp.resp_codec import command
from kvemb.wire.resp.resp_value import ErrorLine, Value

Change = tuple[bytes, bytes | None, bytes]
"""(key, the value expected there or None for none, the value to put in its place)."""

_MAX_HOPS = 8
_PIPELINED = 512
_MAKE_WAY = """
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= ARGV[3] then
    return ARGV[2] == '1' and redis.call('UNLINK', KEYS[1]) or 0
end
if kind == 'string' and redis.call('STRLEN', KEYS[1]) > tonumber(ARGV[1]) then
    redis.call('SET', KEYS[1], redis.call('GETRANGE', KEYS[1], 0, ARGV[1] - 1))
    return 1
end
return 0
"""
_SWAP = f"""
local found = redis.pcall('GET', KEYS[1])
if type(found) == 'table' or (found and #found > {MAX_BLOB_BYTES}) then
    found = '{FOREIGN.decode()}'
end
if found ~= ARGV[1] then
    return 0
end
redis.call('SET', KEYS[1], ARGV[2])
return 1
"""


def swap(address: str, access: RedisAccess, changes: Sequence[Change], run_id: str, deadline: Deadline) -> list[bool | None]:
    """Replace values where they are the ones expected, each in one step, as long as the server is still the same process.

    Return which were, None for a key whose slot has left the server; none if the process is another. After an error some may have been. Of
    a slot that stands open, keys that have left it are changed at the node that takes them.
    """
    words = [swap_words(change) for change in changes]
    replies = _run_all(address, access, words, run_id, deadline, passed_over=(b"-MOVED ",))
    return [None if isinstance(reply, ErrorLine) else reply not in (None, 0) for reply in replies]


def swap_words(change: Change) -> tuple[bytes, ...]:
    """Return the command of one change. It answers OK or nothing where nothing is expected to stand there, else 1 or 0."""
    key, old, new = change
    return (b"SET", key, new, b"NX") if old is None else (b"EVAL", _SWAP.encode(), b"1", key, old, new)


def make_way(
    address: str, access: RedisAccess, keys: Sequence[bytes], wanted: Containers, run_id: str, deadline: Deadline, *, clear: bool
) -> int:
    """Cut strings longer than a page, with `clear` delete values of other types, each in one step; return how many values were changed."""
    commands = [("EVAL", _MAKE_WAY, 1, key, wanted.most_bytes, int(clear), wanted.kind) for key in keys]
    return sum(reply == 1 for reply in _run_all(address, access, commands, run_id, deadline))


def get_following(address: str, access: RedisAccess, key: bytes, deadline: Deadline) -> bytes | None:
    """Read a small value, following redirections of a cluster."""
    asking = False
    for _ in range(_MAX_HOPS):
        with logged_in(address, access, deadline) as link:
            reply = BlobReply(miss=b"$-1")
            before = command(b"ASKING") if asking else b""
            round_trip(link, before + command(b"GET", key), [LineReply(), reply] if asking else [reply], deadline)
        if reply.error is None:
            return reply.value
        if not reply.error.startswith((b"-MOVED ", b"-ASK ")):
            raise server_error(address, reply.error)
        asking = reply.error.startswith(b"-ASK ")
        address = redirect_target(reply.error, address)
    raise NodeUnavailableError(f"node {address}: redirected {_MAX_HOPS} times without an end")


def _run_all(
    address: str,
    access: RedisAccess,
    commands: Sequence[Sequence[Word]],
    run_id: str,
    deadline: Deadline,
    passed_over: tuple[bytes, ...] = (),
) -> list[Value]:
    """The replies to commands, a few round trips for all of them; 0 for each when the server is another process."""
    if not commands:
        return []
    with logged_in(address, access, deadline) as link:
        if run_id_of(link, deadline) != run_id:
            return [0] * len(commands)
        values = [value for rows in chunks(len(commands), _PIPELINED) for value in ask_all(link, commands[rows], deadline)]
    asked: dict[str, list[int]] = {}
    for at, value in enumerate(values):
        if isinstance(value, ErrorLine) and value.line.startswith(b"-ASK "):
            asked.setdefault(redirect_target(value.line, address), []).append(at)
    for target, places in asked.items():
        with logged_in(target, access, deadline) as link:
            for rows in chunks(len(places), _PIPELINED):
                answers = ask_all(link, [words for at in places[rows] for words in (("ASKING",), commands[at])], deadline)[1::2]
                for at, value in zip(places[rows], answers, strict=True):
                    values[at] = value
    for value in values:
        if isinstance(value, ErrorLine) and not value.line.startswith(passed_over):
            why = server_error(address, value.line)
            if isinstance(why, NodeRefusesError):
                raise why
            raise NodeUnavailableError(f"node {address}: refused to change a small value: {why}. Try again.")
    return values
