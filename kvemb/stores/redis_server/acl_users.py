"""Two users of Redis and Valkey servers: one for trainers, which may only read rows, and one for shards, limited to their commands.

The commands are those that this package, `kvemb.stores.redis_cluster` and `kvemb.wire.resp` send. What must not live here: passwords.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvemb.errors import StorageError
from kvemb.net.deadline import Deadline
from kvemb.schema.slots import TAG_SIZE
from kvemb.stores.redis_server.redis_commands import ask, shown
from kvemb.stores.redis_server.redis_login import RedisAccess, logged_in
from kvemb.wire.resp.resp_value import ErrorLine

_KEYS = ("kvemb:*", "?" * TAG_SIZE + "{*}*")  # small values; buckets and pages
_TO_CONNECT = ("auth", "ping", "info", "dbsize", "asking", "client|id", "client|setname", "cluster|slots", "acl|whoami", "acl|dryrun")
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
    """What one kind of process needs of a server.

    Args:
        name: of the user, as `kvemb acl` calls it.
        commands: that it sends; "command|subcommand" where only that.
        keys: patterns of the keys that it touches.
        writes: whether it changes them.
    """

    name: str
    commands: tuple[str, ...]
    keys: tuple[str, ...]
    writes: bool

    def rules(self) -> str:
        """Return the rules as ACL SETUSER and a users file take them, without a password.

        Example:
            >>> TRAINER.rules()[:51]
            'on resetchannels resetkeys -@all %R~kvemb:* %R~???{'
        """
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


def check_user(address: str, access: RedisAccess, wanted: AclUser, deadline: Deadline) -> list[str]:
    """Ask a server which commands the user of these credentials may run; none of them is run.

    Returns:
        Commands that it needs and may not run, and those that it may and should not; nothing where all is well.

    Raises:
        StorageError: the server does not answer, or does not let the user ask.
    """
    wrong = []
    with logged_in(address, access, deadline) as link:
        user = ask(link, deadline, "ACL", "WHOAMI")
        if not isinstance(user, bytes):
            raise StorageError(f"node {address}: ACL WHOAMI answered {shown(user)}, expected a name")
        for allowed, commands in ((True, wanted.needed()), (False, wanted.forbidden())):
            for words in commands:
                if _may(ask(link, deadline, "ACL", "DRYRUN", user, *words)) != allowed:
                    told = "may not run what it needs" if allowed else "may run what it should not"
                    wrong.append(f"node {address}: user {user.decode('utf-8', 'replace')} {told}: {' '.join(words[:3])}")
    return wrong


def _may(answer: object) -> bool:
    return answer in (b"OK", "OK") and not isinstance(answer, ErrorLine)
