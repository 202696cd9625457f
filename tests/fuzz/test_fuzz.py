"""Every target for a moment; `make fuzz` takes longer. And the mutations' own promises."""

import random
from collections.abc import Callable
from pathlib import Path

import msgpack
import pytest

from tests.fuzz.__main__ import TARGETS
from tests.fuzz.http2 import PREFACE, frames_of, odd_connection
from tests.fuzz.mutation import corpus, golden_messages, mutated, odd_message, with_odd_digits
from tests.fuzz.run import fuzz

pytestmark = pytest.mark.full  # bytes of any kind; test_wire_fuzz.py says it of the parsers, and CI fuzzes for five minutes

SECONDS = 4.0


@pytest.mark.parametrize("name", TARGETS)
def test_bytes_of_any_kind_harm_nobody(name: str, tmp_path: Path, require_server: Callable[[str], str]) -> None:
    require_server("redis-server")
    require_server("memcached")
    seed = random.randrange(1 << 32)
    tmp_path.chmod(0o755)
    with TARGETS[name](tmp_path, random.Random(seed)) as target:
        report = fuzz(target, SECONDS)
    assert not report.trouble, f"seed {seed}, after {report.last!r}\n{report}"
    assert report.n_inputs > 5
    assert report.n_honest > 0


def test_a_connection_is_split_into_its_frames_and_joined_again() -> None:
    for seed in corpus("frames"):
        start, frames = frames_of(seed)
        assert start == PREFACE
        assert len(frames) > 3
        assert start + b"".join(frame.encode() for frame in frames) == seed


def test_the_same_seed_makes_the_same_inputs() -> None:
    def inputs() -> list[bytes]:
        chance = random.Random(7)
        made = [mutated(chance, b"$5\r\nhello\r\n"), with_odd_digits(chance, b"$5\r\nhello\r\n")]
        return [*made, *(odd_message(chance, data) for data in golden_messages().values()), odd_connection(chance, corpus("frames")[0])]

    assert inputs() == inputs()


def test_most_odd_messages_are_msgpack_still_and_none_is_what_it_was() -> None:
    chance = random.Random(7)
    seeds = list(golden_messages().values()) * 20
    odd = [odd_message(chance, data) for data in seeds]
    assert sum(made != data for made, data in zip(odd, seeds, strict=True)) > 0.9 * len(seeds)
    n_msgpack = 0
    for made in odd:
        try:
            msgpack.unpackb(made, strict_map_key=False)
            n_msgpack += 1
        except ValueError:
            continue
    assert n_msgpack > 0.9 * len(seeds)
