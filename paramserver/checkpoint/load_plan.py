"""The remaining work of a load, as a file: written when all that it needs from the checkpoint is on the shard's own disk. Pure.

magic 8 | header size u32 | msgpack header | ids to erase of each table, raw '<u8' | xxh3-64 of all before
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvemb.errors import ParameterServerError

MAGIC = b"kvembld1"
_HEAD = struct.Struct("<8sI")


@dataclass(frozen=True, eq=False)
class LoadPlan:
    """The remaining work of one load on one shard, as its folder holds it.

    Args:
        serial, load_id: of the decision.
        version: that every loaded row has.
        steps: the optimizer's step of each table, by key.
        erase: uint64 ids that exist in storage and not in the checkpoint, by the table's key.
    """

    serial: int
    load_id: str
    version: int
    steps: dict[str, int]
    erase: dict[str, NDArray[np.uint64]]


def encode_load_plan(plan: LoadPlan) -> Iterator[bytes | memoryview]:
    """Yield the file's bytes."""
    sizes = {name: len(ids) for name, ids in plan.erase.items()}
    header: bytes = msgpack.packb([plan.serial, plan.load_id, plan.version, plan.steps, sizes])
    checksum = xxhash.xxh3_64()
    arrays = [np.ascontiguousarray(ids, "<u8").tobytes() for ids in plan.erase.values()]
    for piece in (_HEAD.pack(MAGIC, len(header)), header, *arrays):
        checksum.update(piece)
        yield piece
    yield struct.pack("<Q", checksum.intdigest())


def decode_load_plan(data: bytes, where: str) -> LoadPlan:
    """Read the file.

    Raises:
        ParameterServerError: it is damaged; nothing of it was used.
    """
    try:
        magic, size = _HEAD.unpack_from(data)
        if magic != MAGIC or xxhash.xxh3_64_intdigest(memoryview(data)[:-8]) != struct.unpack("<Q", data[-8:])[0]:
            raise ValueError("its checksum does not match")
        at = _HEAD.size + size
        serial, load_id, version, steps, sizes = msgpack.unpackb(data[_HEAD.size : at])
        erase = {}
        for name, n in sizes.items():
            erase[name] = np.frombuffer(data, "<u8", n, at).astype(np.uint64, copy=False)
            at += 8 * n
        if at != len(data) - 8:
            raise ValueError("its size is not what it says")
        return LoadPlan(serial, load_id, version, steps, erase)
    except (ValueError, TypeError, AttributeError, OverflowError, struct.error, msgpack.UnpackException) as error:
        raise ParameterServerError(f"{where}: damaged ({error}); load the checkpoint again") from error
