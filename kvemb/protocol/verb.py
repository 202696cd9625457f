"""A verb of the shards' service: its messages, who may call it, and what a call may cost. Each is declared beside its messages. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvemb.protocol.message_format import Message

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)

TRAINER, ADMIN, READER, SHARD = "trainer", "admin", "reader", "shard"
EVERYBODY, WRITERS = frozenset({TRAINER, ADMIN, READER}), frozenset({TRAINER, ADMIN})
TRAINERS, ADMINS, SHARDS = frozenset({TRAINER}), frozenset({ADMIN}), frozenset({SHARD})


@dataclass(frozen=True, eq=False)
class Verb(Generic[Q, R]):
    """One method of the service."""

    name: str  # of the method, as it travels
    request: type[Q]
    reply: type[R]
    roles: frozenset[str]  # that may call it
    repeatable: bool = False  # asking twice does no harm: a client asks again within its deadline where no answer came
    waits: bool = False  # it may hold its thread on the shard for long: only so many of those may run at once
    streams: bool = False  # a call has many replies


Handled = Mapping[Verb[Any, Any], Callable[..., Message]]
"""The function that answers each verb: (its object, the request, the caller's deadline) -> the reply."""
