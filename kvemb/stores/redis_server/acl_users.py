"""Two users of Redis and Valkey servers: one for trainers, which may only read rows, and one for shards, limited to their commands.

The commands are those that this package, `kvemb.stores.redis_cluster` and `kvemb.wire.resp` send.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvemb.errors import NodeRefusesError, StorageError
from kvemb.net.deadline import Deadline
from kvemb.net.link import Link
from kvemb.schema.slots import TAG_SIZE
from kvemb.stores.redis_server.redis_commands import ask, ask_all, shown
from kvemb.stores.redis_server.redis_login import RedisAccess, logged_in
from kvemb.stores.server_errors import server_error
from kvemb.wire.resp.resp_value import ErrorLine

_KEYS = ("kvemb:*", "?" * TAG_SIZE + "{*}*")  # small values; buckets and pages
_TO_CONNECT = (
    *("auth", "ping", "info", "dbsize", "asking", "client|id", "client|setname"),
    *("cluster|slots", "cluster|nodes", "acl|whoami", "acl|dryrun"),
)
_TO_READ = ("get", "hmget", "hlen", "getrange")
_TO_WRITE = (
    *("set", "del", "unlink", "hset", "hdel", "setrange", "strlen", "type", "eval"),
    *("scan", "hscan", "hkeys", "client|list", "client|kill", "config|get"),
)
_A_KEY = "tab{A}"
_ARGUMENTS = {
    **dict.fromkeys(("get", "hlen", "del", "unlink", "strlen", "type", "hkeys"), (_A_KEY,)),
    **dict.fromkeys(("hmget", "hdel", "set"), (_A_KEY, "x")),
    **{"hset": (_A_KEY, "x", "x"), "getrange": (_A_KEY, "0", "1"), "setrange": (_A_KEY, "0", "x"), "eval": ("return 1", "1", _A_KEY)},
    **{"scan": ("0",), "hscan": (_A_KEY, "0"), "client|kill": ("ID", "1"), "client|setname": ("x",), "config|get": ("x",)},
    **{"acl|dryrun": ("default", "ping"), "auth": ("x", "x")},
}
# Neither needs these, and they would do the worst harm: data gone, settings changed, other keys.
_FORBIDDEN = (
    *(("flushall",), ("flushdb",), ("shutdown",), ("config", "set", "maxmemory", "1"), ("keys", "*"), ("replicaof", "no", "one")),
    *(("acl", "setuser", "x"), ("debug", "sleep", "0"), ("get", "another-programs-key")),
)
_FORBIDDEN_TO_TRAINERS = (("set", _A_KEY, "x"), ("hset", _A_KEY, "x", "x"), ("del", _A_KEY), ("eval", "return 1", "1", _A_KEY))


@dataclass(frozen=True)
class AclUser:
    """What one kind of process needs of a server."""

    name: str  # of the user, as `kvemb acl` calls it
    commands: tuple[str, ...]  # that it sends; "command|subcommand" where only that
    keys: tuple[str, ...]  # patterns of the keys that it touches
    writes: bool  # whether it changes them

    def rules(self) -> str:
        """Return the rules as ACL SETUSER and a users file take them, without a password."""
        keys = (f"{'~' if self.writes else '%R~'}{pattern}" for pattern in self.keys)
        return " ".join(["on", "resetchannels", "resetkeys", "-@all", *keys, *(f"+{command}" for command in self.commands)])

    def needed(self) -> Iterator[tuple[str, ...]]:
        """Yield commands, with arguments, that the user has to be allowed."""
        for command in self.commands:
            yield (*command.split("|"), *_ARGUMENTS.get(command, ()))

    def forbidden(self) -> Iterator[tuple[str, ...]]:
        """Yield commands, with arguments, that it should not be allowed."""
        yield from _FORBIDDEN
        if not self.writes:
            yield from _FORBIDDEN_TO_TRAINERS


TRAINER = AclUser("kvemb-trainer", (*_TO_CONNECT, *_TO_READ), _KEYS, writes=False)
SHARD = AclUser("kvemb-shard", (*_TO_CONNECT, *_TO_READ, *_TO_WRITE), _KEYS, writes=True)
ACL_USERS = {"trainer": TRAINER, "shard": SHARD}
"""By role."""


_SPARED = frozenset({"auth", "ping", "asking", "cluster|slots", "cluster|nodes", "acl|whoami", "acl|dryrun", "config|get"})
"""Commands without which every path still goes; on a cluster, its start has sent those about slots already."""


def require_commands(link: Link, wanted: AclUser, deadline: Deadline) -> None:
    """Refuse a server that has renamed, or forbids this user, a command we need; none is run. One that forbids the question is taken."""
    needed = [words for command, words in zip(wanted.commands, wanted.needed(), strict=True) if command not in _SPARED]
    (user,) = ask_all(link, [("ACL", "WHOAMI")], deadline)
    if not isinstance(user, bytes):
        return
    answers = ask_all(link, [("ACL", "DRYRUN", user, *words) for words in needed], deadline)
    unknown = [words for words, answer in zip(needed, answers, strict=True) if _is_unknown(answer)]
    barred = [words for words, answer in zip(needed, answers, strict=True) if isinstance(answer, bytes) and not _may(answer)]
    name, who = user.decode("utf-8", "replace"), wanted.name.removeprefix("kvemb-")
    if unknown:
        raise NodeRefusesError(
            f"node {link.address}: does not know {_names(unknown)}, which a {who} needs: renamed or switched off. Take `rename-command` "
            "out of its configuration, and start it again; users limit commands, too (`kvemb acl`)."
        )
    if barred:
        raise NodeRefusesError(
            f"node {link.address}: does not let user {name} run {_names(barred)}, which a {who} needs; `kvemb acl` prints its rules."
        )


def unknown_commands(link: Link, deadline: Deadline) -> str:
    """Return the commands that shards need and the server does not know, or has renamed, in words; "" also where it does not say."""
    names = [command.split("|")[0] for command in SHARD.commands if command not in _SPARED]
    (answer,) = ask_all(link, [("COMMAND", "INFO", *names)], deadline)
    known = answer if isinstance(answer, list) else names
    return ", ".join(dict.fromkeys(name.upper() for name, found in zip(names, known, strict=False) if found is None))


def _names(commands: Sequence[tuple[str, ...]]) -> str:
    return ", ".join(" ".join(words[: 2 if words[0] in ("client", "config") else 1]).upper() for words in commands)


def _is_unknown(answer: object) -> bool:
    return isinstance(answer, ErrorLine) and b" not found" in answer.line


def check_user(address: str, access: RedisAccess, wanted: AclUser, deadline: Deadline) -> list[str]:
    """Ask which commands the user of these credentials lacks, and which it may run and should not: two lists. None of them is run."""
    wrong = []
    with logged_in(address, access, deadline) as link:
        user = ask(link, deadline, "ACL", "WHOAMI")
        if not isinstance(user, bytes):
            raise StorageError(f"node {address}: ACL WHOAMI answered {shown(user)}, expected a name")
        for allowed, commands in ((True, wanted.needed()), (False, wanted.forbidden())):
            for words in commands:
                (answer,) = ask_all(link, [("ACL", "DRYRUN", user, *words)], deadline)
                if isinstance(answer, ErrorLine) and not _is_unknown(answer):
                    raise server_error(address, answer.line)
                if _may(answer) != allowed:
                    told = "may not run what it needs" if allowed else "may run what it should not"
                    wrong.append(f"node {address}: user {user.decode('utf-8', 'replace')} {told}: {' '.join(words[:3])}")
    return wrong


def _may(answer: object) -> bool:
    return answer in (b"OK", "OK") and not isinstance(answer, ErrorLine)
