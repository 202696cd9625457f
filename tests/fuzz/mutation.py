"""Inputs: the corpus, and what chance makes of it. Pure, but for reading the corpus.

A mutation knows nothing of what it changes (bytes), or something: msgpack's items, HTTP/2's frames (`http2`).
"""

import json
import random
import struct
from pathlib import Path
from typing import Any

import msgpack

FOLDER = Path(__file__).parent / "corpus"
_GOLDEN = Path(__file__).resolve().parents[1] / "unit/golden/messages_v1.json"
_MOST_BYTES = 1 << 20
_NUMBERS = (-1, 0, 1, 127, 128, 255, 256, 65_535, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
_ODD: tuple[Any, ...] = (None, True, b"", "", "\x00", "x" * 300, 1e308, float("nan"), -0.0, [], {}, [[]] * 30, *_NUMBERS, -(2**63))
_TEXTS = (
    b"\r\n",
    b"\x00",
    b"\xff" * 8,
    b"$-1\r\n",
    b"*2147483647\r\n",
    b"$999999999999\r\n",
    b"VA 99999999 c1\r\n",
    b"END\r\n",
    b"-ERR x\r\n",
    b":1\r\n",
)


def corpus(name: str) -> list[bytes]:
    """Return the kept inputs of a target."""
    return [path.read_bytes() for path in sorted((FOLDER / name).glob("*.bin"))]


def golden_messages() -> dict[str, bytes]:
    """Return one message of each kind, by its name."""
    return {name: bytes.fromhex(text) for name, text in json.loads(_GOLDEN.read_text()).items()}


def mutated(chance: random.Random, data: bytes) -> bytes:
    """The same with bytes changed, cut, doubled, put in; or cut off."""
    made = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 8))):
        at = chance.randrange(len(made) + 1)
        match chance.randrange(8):
            case 0:
                made[at : at + 1] = chance.randbytes(1)
            case 1 if made:
                made[at % len(made)] ^= 1 << chance.randrange(8)
            case 2:
                del made[at : at + chance.choice((1, 2, 16, 256))]
            case 3:
                made[at:at] = made[at : at + chance.choice((1, 16, 256, 4096))]
            case 4:
                made[at:at] = chance.randbytes(chance.choice((1, 4, 32, 4096)))
            case 5:
                number = chance.choice(_NUMBERS) & (2**64 - 1)
                packed = struct.pack(chance.choice(("<Q", ">Q")), number)
                n_bytes = chance.choice((1, 2, 3, 4, 8))
                made[at : at + n_bytes] = packed[:n_bytes]
            case 6:
                made[at:at] = chance.choice(_TEXTS) * chance.choice((1, 1, 1, 100, 10_000))
            case _:
                del made[at:]
    return bytes(made[:_MOST_BYTES])


def with_odd_digits(chance: random.Random, data: bytes) -> bytes:
    """The same with one of the decimal numbers in it another one: a length, a count, a token."""
    at = [index for index, byte in enumerate(data[:4096]) if 48 <= byte <= 57]
    if not at:
        return mutated(chance, data)
    first = last = chance.choice(at)
    while last < len(data) and 48 <= data[last] <= 57:
        last += 1
    other = chance.choice((b"%d" % chance.choice(_NUMBERS), b"-1", b"+1", b"1e9", b"0" * 4096, b"9" * 4096, b"", b" 1"))
    return data[:first] + other + data[last:]


def odd_message(chance: random.Random, data: bytes) -> bytes:
    """A msgpack message with one item, somewhere in it, another one; still msgpack."""
    try:
        return bytes(msgpack.packb(_odd(chance, msgpack.unpackb(data, strict_map_key=False), depth=0)))
    except Exception:  # no msgpack, or nothing that it can hold
        return mutated(chance, data)


def _odd(chance: random.Random, value: Any, *, depth: int) -> Any:
    if isinstance(value, list) and value and chance.random() < 0.9:
        at = chance.randrange(min(3, len(value) - 1), len(value)) if depth == 0 else chance.randrange(len(value))
        match chance.randrange(8):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value[:at] + value[at : at + 1] * chance.choice((2, 50, 5000)) + value[at:]
        return [*value[:at], _odd(chance, value[at], depth=depth + 1), *value[at + 1 :]]
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        return {**value, chance.choice((key, key, key, "other", 1)): _odd(chance, value[key], depth=depth + 1)}
    if isinstance(value, bytes) and value and chance.random() < 0.7:
        return mutated(chance, value)
    if isinstance(value, str) and chance.random() < 0.3:
        return value + chance.choice(("x", "/", "..", "\n", "\u202e"))
    if isinstance(value, int) and chance.random() < 0.3:
        return value + chance.choice((-1, 1))
    return chance.choice(_ODD)
