"""Opens the shards of a cluster and makes sure that they and the storage nodes belong together."""

import os
import secrets
import time

from kvemb.client.ack import DEFAULT_TIMEOUT_S
from kvemb.client.all_shards import AllShards, require_one_cluster
from kvemb.client.push_session import PushSession
from kvemb.client.shard_client import ShardClient
from kvemb.config import Config
from kvemb.errors import ShardStartingError, ShardUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.net.tls_probe import own_uris
from kvemb.protocol.messages import DescribeReply
from kvemb.protocol.roles import caller_of, seat_of
from kvemb.stores.store import Store

_BARRIER_MARGIN_S = 10.0


def open_shards(config: Config, trainer: str | None, store: Store, deadline: Deadline, *, answers_s: float) -> ShardClient:
    """Connect to the shards, then open the storage that they have provisioned.

    Raises:
        ConfigError, ShardUnavailableError (of shard 0), StorageError, ParameterServerError: nothing stays connected but the store,
            which the caller closes.
    """
    sync = config.servers.mode == "sync"
    servers = AllShards.of(config.servers, store.nodes)
    try:
        described, deadline = _described(servers, config, deadline, answers_s)  # shard 0, which provisions storage; that names the others
        require_one_cluster(store.open(deadline)[0].cluster_id, described.cluster_id)
        _described(servers, config, deadline, answers_s)
    except BaseException:
        servers.close()
        raise
    name = trainer or _drawn_name(config)
    # In sync mode a step that lacks a trainer fails after barrier_timeout_s, naming it: wait for that message.
    step_s = config.servers.barrier_timeout_s + _BARRIER_MARGIN_S if sync else 0.0
    timeout_s = max(config.servers.away_timeout_s, step_s)
    session = PushSession(servers, described.cluster_id, name, sync=sync, timeout_s=timeout_s)
    return ShardClient(servers, session, timeout_s, close_timeout_s=max(DEFAULT_TIMEOUT_S, step_s))


def _described(servers: AllShards, config: Config, deadline: Deadline, answers_s: float) -> tuple[DescribeReply, Deadline]:
    """Ask every shard to describe itself; one that is starting is waited for as long as a shard may be away.

    Returns:
        The answer of shard 0, and the deadline of the next steps.
    """
    begun_s = time.monotonic()
    while True:
        try:
            return servers.describe(config, deadline.within(answers_s)), deadline
        except ShardStartingError:
            if time.monotonic() - begun_s >= config.servers.away_timeout_s:
                raise
            deadline = Deadline.after(deadline.timeout_s, deadline.silent_s)
        except ShardUnavailableError as error:
            raise ShardUnavailableError(f"{error} A program that only pulls needs no shard: connect with read_only=True.") from error


def _drawn_name(config: Config) -> str:
    """A name that no other trainer has; one that this process's certificate lets it take, where it has one."""
    tls, own = config.servers.tls, None
    if tls is not None and not tls.has_token:
        own = seat_of(caller_of(own_uris(tls, "parameter_servers.tls"), config.cluster))
    if own is None:
        return f"{os.uname().nodename[:200]}-{os.getpid()}-{secrets.token_hex(4)}"
    return f"{own[:200]}/{os.getpid()}-{secrets.token_hex(4)}"
