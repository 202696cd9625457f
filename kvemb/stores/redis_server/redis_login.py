"""Logging in to a Redis or Valkey server: for a few commands, or as a role whose connections carry rows and are ended where in doubt.

A write on a connection that was given up may still sit in the server's buffers. It would land late, over a newer one. So such a connection
is killed by its id, and that is confirmed, before the next one of its process carries anything.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from kvemb.config import StorageConfig
from kvemb.errors import ConfigError, DeadlineExceededError, NodeUnavailableError, ProtocolError
from kvemb.net.deadline import Deadline
from kvemb.net.link import Connect, Link, connect_link
from kvemb.stores.redis_server.redis_commands import ask, number_of, text_of

log = logging.getLogger("kvemb")


@dataclass(frozen=True)
class RedisAccess:
    """How Redis servers are reached: credentials, and a function that opens a connection."""

    config: StorageConfig  # the storage section, for its credentials
    connect: Connect = connect_link  # opens connections


def log_in(address: str, access: RedisAccess, deadline: Deadline, name: str = "") -> Link:
    """Connect and authenticate."""
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
def logged_in(address: str, access: RedisAccess, deadline: Deadline) -> Iterator[Link]:
    """The same for the length of a `with` block."""
    link = log_in(address, access, deadline)
    try:
        yield link
    finally:
        link.close()


class RoleLinks:
    """The data links of one role: they carry its name on the servers, so that operators and a successor can tell which process writes."""

    def __init__(self, access: RedisAccess, role: str) -> None:
        self._access, self._role, self._name = access, role, f"kvemb-{role.replace(':', '-')}"
        # Of each address: a server process's run id, and its number of a connection. Numbers start again with the process, and then mean
        # strangers.
        self._in_doubt: dict[str, set[tuple[str, str]]] = {}
        self._own: set[tuple[str, str]] = set()

    def open(self, address: str, deadline: Deadline) -> Link:
        """Open an authenticated data link, once older ones to that address on which a write may be in flight are confirmed dead.

        Those of another server process stay noted: they died with it, or the address leads elsewhere for a while.
        """
        link = log_in(address, self._access, deadline, self._name)
        try:
            link.connection_id = str(number_of(link, ask(link, deadline, "CLIENT", "ID"), "CLIENT ID"))
            link.run_id = run_id_of(link, deadline)
            doubtful = self._in_doubt.setdefault(address, set())
            for old in sorted(doubtful):
                if old[0] == link.run_id:
                    self._end(link, old[1], deadline)
                    doubtful.discard(old)
        except BaseException:
            link.close()
            raise
        self._own.add((link.run_id, link.connection_id))
        return link

    def dropped(self, link: Link) -> None:
        """A link was given up with requests in flight."""
        self._in_doubt.setdefault(link.address, set()).add((link.run_id, link.connection_id))
        self._own.discard((link.run_id, link.connection_id))

    def kill_others(self, addresses: Iterable[str], deadline: Deadline) -> int:
        """End the role's connections of other processes; see `Store.kill_other_writers`."""
        killed = 0
        for address in addresses:
            killed += self._kill_others_at(address, deadline)
            with logged_in(address, self._access, deadline) as link:
                replicas = replicas_of(fields_of(link, deadline, "replication"))
            for replica in replicas:
                try:
                    killed += self._kill_others_at(replica, deadline)
                except NodeUnavailableError as error:
                    log.warning("older connections of %s on the replica %s of %s were not ended: %s", self._role, replica, address, error)
        return killed

    def _kill_others_at(self, address: str, deadline: Deadline) -> int:
        own, killed = frozenset(self._own), set[str]()
        with logged_in(address, self._access, deadline) as link:
            run_id = run_id_of(link, deadline)
            while True:
                listed = _connections(text_of(link, ask(link, deadline, "CLIENT", "LIST"), "CLIENT LIST"), self._name)
                others = {one for one in listed if (run_id, one) not in own}
                if not others:
                    return len(killed)
                if deadline.expired:
                    raise DeadlineExceededError(f"node {address}: {len(others)} connections of {self._role} could not be ended")
                for one in others:
                    self._end(link, one, deadline)
                killed |= others

    def _end(self, link: Link, connection_id: str, deadline: Deadline) -> None:
        """End a connection; one that is dead already is as good."""
        try:
            number_of(link, ask(link, deadline, "CLIENT", "KILL", "ID", connection_id), "CLIENT KILL")
        except ConfigError:  # a trainer's user that may not end connections may not write either (`acl_users`): nothing is in doubt
            if self._role != "trainer":
                raise


def fields_of(link: Link, deadline: Deadline, section: str) -> dict[str, str]:
    """Return a section of the server's INFO: its lines `name:value`."""
    text = text_of(link, ask(link, deadline, "INFO", section), "INFO")
    pairs = (line.partition(":") for line in text.splitlines() if not line.startswith("#"))
    return {name: value for name, colon, value in pairs if colon}


def run_id_of(link: Link, deadline: Deadline) -> str:
    """Which server process is at the other end."""
    run_id = fields_of(link, deadline, "server").get("run_id", "")
    if not re.fullmatch(r"\w{1,64}", run_id):
        raise ProtocolError(f"node {link.address}: INFO without a run_id; is this a Redis or Valkey server?")
    return run_id


def replicas_of(fields: Mapping[str, str]) -> list[str]:
    """The addresses of a primary's replicas, from its INFO."""
    found = []
    for name, value in fields.items():
        if re.fullmatch(r"slave\d+", name):
            words = dict(word.split("=", 1) for word in value.split(",") if "=" in word)
            if words.get("ip") and words.get("port", "").isdigit():
                found.append(f"{words['ip']}:{words['port']}")
    return found


def _connections(listing: str, name: str) -> set[str]:
    """The numbers of the connections of that name."""
    found = set()
    for line in listing.splitlines():
        words = dict(word.split("=", 1) for word in line.split(" ") if "=" in word)
        if words.get("name") == name and words.get("id", "").isdigit():
            found.add(words["id"])
    return found
