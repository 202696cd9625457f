"""The commands of `redis-cli` by which a cluster's nodes join, leave and get other shares, as an operator types them. Pure."""

import shlex
from collections.abc import Mapping, Sequence

import numpy as np

from kvemb.config import StorageConfig
from kvemb.errors import ConfigError, InvalidInputError
from kvemb.stores.redis_cluster.slot_map import SlotMap

_ACQUAINTED_S = 15  # until all nodes have heard of a new one
_N_ADDRESSES = {"add": (1, 99), "remove": (1, 1), "replace": (2, 2), "rebalance": (0, 0)}


def node_commands(
    action: str, addresses: Sequence[str], weights: Mapping[str, float], slot_map: SlotMap, config: StorageConfig, *, bus_port: int = 0
) -> list[str]:
    """Return the commands, in order, for "add", "remove", "replace" or "rebalance"; `weights`: shares of slots by address, else 1.

    `bus_port` is that of the node that told the map, where the one that is to be replaced does not answer; else 0.
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
    if leaving and bus_port:
        return _in_place_of_dead(leaving, joining[0], slot_map, config, bus_port)
    if leaving:
        shares[_name(leaving, slot_map)] = 0.0
    lines += [f"{cluster} add-node {address} {there}" for address in joining]
    if joining:
        lines.append(f"sleep {_ACQUAINTED_S}")
    empty = " --cluster-use-empty-masters" if joining else ""
    weight = " ".join(["", "--cluster-weight", *(f"{name}={share:g}" for name, share in shares.items())]) if shares else ""
    lines.append(f"{cluster} rebalance {there}{empty}{weight}")
    if leaving:
        lines.append(f"{cluster} del-node {there} {_name(leaving, slot_map)}")
    return lines


def _in_place_of_dead(dead: str, new: str, slot_map: SlotMap, config: StorageConfig, bus_port: int) -> list[str]:
    """The new node gets all slots at once, empty: the shards bring the rows back. (`fix` deals them out one by one, for minutes.)"""
    name, mine = _name(dead, slot_map), np.flatnonzero(slot_map.slots_of(dead))
    ranges = np.split(mine, np.flatnonzero(np.diff(mine) > 1) + 1)
    slots = " ".join(f"$(seq {some[0]} {some[-1]})" for some in ranges)
    cluster = f"redis-cli {_login(config)}--cluster call {slot_map.source}"
    at_new = f"redis-cli {_login(config)}-h {' -p '.join(new.rsplit(':', 1))}"
    return [
        f"{at_new} CLUSTER MEET {' '.join(slot_map.source.rsplit(':', 1))} {bus_port}",
        f"sleep {_ACQUAINTED_S}",
        f"{cluster} CLUSTER DELSLOTS {slots}",
        f"{at_new} CLUSTER ADDSLOTS {slots}",
        f"{at_new} CLUSTER BUMPEPOCH",  # the dead node may come back and claim them
        f"{cluster} CLUSTER FORGET {name}",
    ]


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
