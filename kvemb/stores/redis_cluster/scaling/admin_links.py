"""Administrators' connections to the nodes of a cluster, one each, kept open for as long as slots are moved. One thread."""

from collections.abc import Sequence
from types import TracebackType

from kvemb.errors import DeadlineExceededError, NodeUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.net.link import Link
from kvemb.stores.node_batch import server_error
from kvemb.stores.redis_cluster.scaling.cluster_nodes import ClusterView, merged_view, parse_nodes
from kvemb.stores.redis_server.redis_commands import RedisAccess, Word, ask_all, open_admin, text_of
from kvemb.wire.resp.resp_value import ErrorLine, Value

_ANSWER_S = 2.0  # for a node that may be dead while others are there to ask


class AdminLinks:
    """Connections by address; a context manager that closes them.

    Args:
        access: credentials, and what connects. The user must be an administrator.
    """

    def __init__(self, access: RedisAccess) -> None:
        self._access = access
        self._links: dict[str, Link] = {}

    def __enter__(self) -> "AdminLinks":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()

    def run(self, address: str, commands: Sequence[Sequence[Word]], timeout_s: float) -> list[Value]:
        """Run commands in one round trip; errors are values. After an error of the connection they may have run, or may run later."""
        deadline = Deadline.after(timeout_s)
        link = self._links.pop(address, None)
        if link is None:
            link = open_admin(address, self._access, deadline, "kvemb-nodes")
        try:
            values = ask_all(link, commands, deadline)
        except BaseException:
            link.close()
            raise
        self._links[address] = link
        return values

    def ask(self, address: str, *words: Word, timeout_s: float | None = None) -> Value:
        """Run one command.

        Raises:
            KvembError: what the server's error means.
        """
        (value,) = self.run(address, [words], timeout_s or self._access.config.timeout_s)
        if isinstance(value, ErrorLine):
            raise server_error(address, value.line)
        return value

    def view(self, candidates: Sequence[str]) -> ClusterView:
        """Return the cluster as its primaries see it, each of itself; those that do not answer, as another sees them.

        Raises:
            NodeUnavailableError: nobody answers.
        """
        failures = []
        for first in dict.fromkeys(candidates):
            try:
                told = parse_nodes(self._told(first), first)
            except (NodeUnavailableError, DeadlineExceededError) as error:
                failures.append(str(error))
                continue
            answers = [told]
            for node in told:
                if node.is_primary and node.known and "myself" not in node.flags:
                    try:
                        answers.append(parse_nodes(self._told(node.address), node.address))
                    except (NodeUnavailableError, DeadlineExceededError):
                        continue
            return merged_view(answers)
        raise NodeUnavailableError("no node of the cluster answers: " + "; ".join(failures))

    def _told(self, address: str) -> str:
        timeout_s = min(_ANSWER_S, self._access.config.timeout_s)
        answer = self.ask(address, "CLUSTER", "NODES", timeout_s=timeout_s)
        return text_of(self._links[address], answer, "CLUSTER NODES")
