"""The name and roles of a shards' client by its certificate, as verbs ask for them. Pure.

A certificate says it in URIs among its subject alternative names, `kvemb://CLUSTER/ROLE/NAME`, as many as it has roles:

    kvemb://ads/trainer/host-3     pulls and pushes, as trainer "host-3" or "host-3/…" and as no other
    kvemb://ads/trainer/*          … under any name
    kvemb://ads/admin/alice        also erases, drops, loads, repairs; takes no trainer's place
    kvemb://ads/reader/dashboard   only asks
    kvemb://ads/shard/0            serves, and asks other shards for slots that they hand over; no client's
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from kvemb.errors import AccessDeniedError
from kvemb.protocol.verb import ADMIN, READER, SHARD, TRAINER, Verb

SCHEME = "kvemb://"
ROLES = (TRAINER, ADMIN, READER, SHARD)


@dataclass(frozen=True)
class Caller:
    """A client that calls a shard."""

    shown: str  # the caller's name in messages
    grants: tuple[tuple[str, str], ...]  # (role, name) of each URI; the name "*" stands for any

    def require(self, verb: Verb[Any, Any]) -> None:
        """Raise unless the caller may call a verb."""
        if not any(role in verb.roles for role, _ in self.grants):
            needed = " or ".join(sorted(verb.roles))
            raise AccessDeniedError(f"{verb.name}: {self.shown} may not do this; it takes the role {needed}. Nothing was changed.")

    def require_seat(self, trainer: str) -> None:
        """Raise AccessDeniedError, which names the trainers that it may be, unless the caller may push as this one."""
        names = [name for role, name in self.grants if role == TRAINER]
        if not any(name == "*" or trainer == name or trainer.startswith(f"{name}/") for name in names):
            may = " or ".join(f'"{name}" or "{name}/…"' for name in names) or "no trainer"
            raise AccessDeniedError(
                f"{self.shown} may be {may}, and not trainer {trainer!r}: that place is another's. Nothing was changed."
            )


ANYBODY = Caller("anybody", ((TRAINER, "*"), (ADMIN, "*"), (SHARD, "*")))
"""Without TLS, and for holders of the token: clients are not told apart."""


def caller_of(uris: Iterable[str], cluster: str) -> Caller:
    """Return the holder of a certificate."""
    own = [uri for uri in uris if uri.startswith(SCHEME)]
    grants = []
    for uri in own:
        parts = uri.removeprefix(SCHEME).split("/", 2)
        if len(parts) == 3 and unquote(parts[0]) == cluster and parts[1] in ROLES and parts[2]:
            grants.append((parts[1], unquote(parts[2])))
    return Caller(f"the certificate of {', '.join(own)}" if own else f"a certificate without a {SCHEME} name", tuple(grants))


def seat_of(caller: Caller) -> str | None:
    """Return the trainer that a certificate names, where it names one."""
    return next((name for role, name in caller.grants if role == TRAINER and name != "*"), None)
