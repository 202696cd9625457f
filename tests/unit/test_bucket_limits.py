"""The server limits that tables in buckets need, and the messages where they do not fit."""

import logging

import pytest

import kvemb.init
import kvemb.optim
from kvemb.errors import ConfigError, DeadlineExceededError, InvalidInputError, NodeUnavailableError
from kvemb.net.deadline import Deadline
from kvemb.schema.bucket_limits import BucketLimits, limits_for, misfits
from kvemb.schema.table_def import TableDef
from paramserver.model.bucket_settings import require_limits, settle_limits

DEFAULTS = BucketLimits(512, 64)


def table(name: str, dim: int, layout: str = "fast") -> TableDef:
    definition = TableDef(name, dim, kvemb.optim.sgd(), kvemb.init.zeros())
    return definition.laid_out(10_000, layout)


LONG, SHORT, SMALL = table("long", 16), table("short", 8), table("small", 16, "compact")


class LimitedStore:
    """A store of two nodes, as far as limits go.

    Args:
        limits: of its nodes; None where it has no buckets.
        refused: its nodes' answer when asked to change them.
    """

    addresses = ("one:1", "two:2")

    def __init__(self, limits: BucketLimits | None, refused: Exception | None = None, unreadable: Exception | None = None) -> None:
        self.rows = self.nodes = self
        self.now = dict.fromkeys(self.addresses, limits)
        self._refused, self._unreadable = refused, unreadable

    def bucket_limits(self, address: str, deadline: Deadline) -> BucketLimits | None:
        if self._unreadable is not None:
            raise self._unreadable
        return self.now[address]

    def set_bucket_limits(self, address: str, limits: BucketLimits, deadline: Deadline) -> None:
        if self._refused is not None:
            raise self._refused
        self.now[address] = limits


def test_compact_tables_want_room_for_their_records_and_no_hashes_of_hundreds_of_rows() -> None:
    assert limits_for([LONG, SHORT], DEFAULTS) == DEFAULTS
    assert limits_for([LONG, SMALL, table("wider", 64, "compact")], DEFAULTS) == BucketLimits(128, 268)
    assert limits_for([SMALL], BucketLimits(200, 1000)) == BucketLimits(200, 1000)
    assert limits_for([SMALL], BucketLimits(64, 1000)) == BucketLimits(128, 1000)


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        (DEFAULTS, ["small"]),
        (BucketLimits(128, 64), ["small"]),
        (BucketLimits(128, 76), []),
        (BucketLimits(256, 4096), []),
        (BucketLimits(64, 4096), ["small"]),
        (BucketLimits(512, 78), ["long", "small"]),
        (BucketLimits(257, 79), ["long", "short", "small"]),
    ],
)
def test_a_table_whose_buckets_would_be_what_they_should_not_is_told(limits: BucketLimits, told: list[str]) -> None:
    dense = TableDef("dense", 16, kvemb.optim.sgd(), kvemb.init.zeros(), num_ids=10)
    texts = list(misfits([LONG, SHORT, SMALL, dense], limits))
    assert [text.split("'")[1] for text in texts] == told
    assert all("CONFIG SET hash-max-listpack-" in text for text in texts)


def test_what_is_told_names_the_limit_its_value_the_one_needed_and_the_command() -> None:
    (text,) = misfits([SMALL], DEFAULTS)
    assert text.startswith("table 'small' (layout compact, records of 76 bytes): hash-max-listpack-entries is 512, 128 is needed")
    assert "hash-max-listpack-value is 64, 76 is needed (CONFIG SET hash-max-listpack-value 76)" in text


def test_a_compact_table_sets_the_limits_of_every_node() -> None:
    store = LimitedStore(DEFAULTS)
    require_limits(store, SMALL, 1.0)  # type: ignore[arg-type]
    assert set(store.now.values()) == {BucketLimits(128, 76)}
    require_limits(LimitedStore(None), SMALL, 1.0)  # type: ignore[arg-type]  # a checkpoint's table on storage without buckets


def test_a_compact_table_is_refused_where_limits_may_not_be_read_or_changed(caplog: pytest.LogCaptureFixture) -> None:
    refused = LimitedStore(DEFAULTS, ConfigError("no permissions"))
    with pytest.raises(InvalidInputError, match=r"node one:1: table 'small'.*is 64, 76 is needed \(CONFIG SET.*no permissions"):
        require_limits(refused, SMALL, 1.0)  # type: ignore[arg-type]
    silent = LimitedStore(DEFAULTS, unreadable=ConfigError("no permissions"))
    with pytest.raises(InvalidInputError, match=r"'small'.*node one:1 cannot be read: no permissions"):
        require_limits(silent, SMALL, 1.0)  # type: ignore[arg-type]
    for passing in (NodeUnavailableError("down"), DeadlineExceededError("hangs")):
        with pytest.raises(type(passing)):
            require_limits(LimitedStore(DEFAULTS, unreadable=passing), SMALL, 1.0)  # type: ignore[arg-type]
        with pytest.raises(type(passing)):
            require_limits(LimitedStore(DEFAULTS, refused=passing), SMALL, 1.0)  # type: ignore[arg-type]
    require_limits(silent, LONG, 1.0)  # type: ignore[arg-type]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    settle_limits(refused, ["two:2"], [LONG, SMALL], 1.0)  # type: ignore[arg-type]
    assert "node two:2: table 'small'" in caplog.text


def test_a_fast_table_on_a_server_with_raised_limits_is_told_and_made(caplog: pytest.LogCaptureFixture) -> None:
    store = LimitedStore(BucketLimits(512, 1024))
    require_limits(store, LONG, 1.0)  # type: ignore[arg-type]
    assert set(store.now.values()) == {BucketLimits(512, 1024)}
    assert "node two:2: table 'long' (layout fast, records of 76 bytes): hash-max-listpack-entries is 512, 256 is needed" in caplog.text
