"""The commands of `redis-cli` by which a cluster's nodes join, leave and get other shares, as an operator types them. Pure."""

import shlex
from collections.abc import Mapping, Sequence

from kvemb.config import StorageConfig
from kvemb.errors import ConfigError, InvalidInputError
from kvemb.stores.redis_cluster.slot_map import SlotMap

_ACQUAINTED_S = 15  # until all nodes have heard of a new one
_N_ADDRESSES = {"add": (1, 99), "remove": (1, 1), "replace": (2, 2), "rebalance": (0, 0)}


def node_commands(
    action: str, addresses: Sequence[str], weights: Mapping[str, float], slot_map: SlotMap, config: StorageConfig, *, dead: bool = False
) -> list[str]:
    """Return the commands, in their order.

    Args:
        action: "add", "remove", "replace" or "rebalance".
        addresses: that it is about.
        weights: shares of the slots by address, 1 for a node without one.
        slot_map: of the cluster as it is.
        config: how its nodes are reached.
        dead: whether the node that is to be replaced does not answer.
    """
    least, most = _N_ADDRESSES[action]
    if not least <= len(addresses) <= most:
        raise ConfigError(f"{action}: got {len(addresses)} addresses, expected {least}{' or more' if most > least else ''}")
    leaving, joining = ("", addresses) if action == "add" else (addresses[0] if addresses else "", addresses[1:])
    there = next((address for address in (slot_map.source, *slot_map.addresses) if address != leaving), leaving)
    if there == leaving:
        raise InvalidInputError(f"node {leaving}: is the only one; its rows have nowhere to go")
    shares = {_name(address, slot_map): share for address, share in weights.items()}
    cluster = f"redis-cli {_login(config)}--cluster"
    lines = []
    if leaving and dead:  # its slots go to others, empty: the shards bring the rows back
        lines.append(f"yes yes | {cluster} fix {there} --cluster-fix-with-unreachable-masters")  # it asks, also with --cluster-yes
        lines.append(f"{cluster} call {there} CLUSTER FORGET {_name(leaving, slot_map)}")
    elif leaving:
        shares[_name(leaving, slot_map)] = 0.0
    lines += [f"{cluster} add-node {address} {there}" for address in joining]
    if joining:
        lines.append(f"sleep {_ACQUAINTED_S}")
    empty = " --cluster-use-empty-masters" if joining else ""
    weight = " ".join(["", "--cluster-weight", *(f"{name}={share:g}" for name, share in shares.items())]) if shares else ""
    lines.append(f"{cluster} rebalance {there}{empty}{weight}")
    if leaving and not dead:
        lines.append(f"{cluster} del-node {there} {_name(leaving, slot_map)}")
    return lines


def _name(address: str, slot_map: SlotMap) -> str:
    if name := slot_map.names.get(address, ""):
        return name
    raise InvalidInputError(f"node {address}: is no primary that has slots; those are {', '.join(slot_map.addresses)}")


def _login(config: StorageConfig) -> str:
    """The options for an administrator, whose name is to be filled in where kvemb.yaml names a user of ours."""
    words = [] if config.username is None else ["--user", "ADMINISTRATOR"]
    if config.tls is not None:
        files = (("--cacert", config.tls.ca), ("--cert", config.tls.cert), ("--key", config.tls.key))
        words += ["--tls", *(word for option, path in files if path for word in (option, shlex.quote(path)))]
    return "".join(f"{word} " for word in words)
