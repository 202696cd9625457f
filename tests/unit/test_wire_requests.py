"""Requests as golden bytes, and what the codecs refuse to send."""

import numpy as np
import pytest

from kvemb.schema.buckets import BucketKeys, WholeBuckets
from kvemb.schema.keys import RowKeys
from kvemb.wire.codec import RecordsToWrite
from kvemb.wire.memcached.meta_codec import MetaCodec
from kvemb.wire.replies import Step
from kvemb.wire.request_arrays import chunks, columns, decimals
from kvemb.wire.resp.resp_codec import RespCodec, command

KEYS = RowKeys(b"tab", np.array([1, 2**64 - 1], dtype=np.uint64))
BUCKETED = BucketKeys(b"tab", KEYS.ids, 2)
A, B = b"tabAAAAAAAAAAB", b"tabP__________"
RECORDS = RecordsToWrite(np.frombuffer(b"abc\r\nxyz\r\n", dtype=np.uint8).reshape(2, 5))
ASK = b"*1\r\n$6\r\nASKING\r\n"


def sent(steps: list[Step]) -> bytes:
    return b"".join(bytes(step.request) for step in steps)


def outputs(n: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((n, size), dtype=np.uint8), np.zeros(n, dtype=bool)


def test_keys_are_what_these_goldens_assume() -> None:
    assert KEYS.encode().tobytes() == b"tabAAAAAAAAAAB" + b"tabP" + b"_" * 10


def test_records_are_put_in_order_as_they_are_sent() -> None:
    turned = RecordsToWrite(RECORDS.values, np.array([1, 0]))
    straight = RecordsToWrite(RECORDS.values[::-1])
    for codec in (RespCodec(), RespCodec(rows_per_step=1)):
        steps = [codec.write_steps(BUCKETED, records, None, np.zeros(2, dtype=np.uint8)) for records in (turned, straight)]
        assert sent(steps[0]) == sent(steps[1])


def test_a_whole_bucket_is_unlinked() -> None:
    steps = RespCodec(asking=True).erase_steps(WholeBuckets(b"tab", np.array([0, 1], dtype=np.uint64), 2), np.zeros(2, dtype=np.uint8))
    assert sent(steps) == b"".join(ASK + b"*2\r\n$6\r\nUNLINK\r\n$8\r\n%s\r\n" % key for key in (b"tab{DLH}", b"tab{DnL}"))


def test_asking_goes_before_every_command() -> None:
    one = np.zeros(1, dtype=np.uint8)
    plain, asking = RespCodec(), RespCodec(asking=True)
    for rows in (BUCKETED[:1], BUCKETED[1:]):
        pairs = (
            (plain.read_steps(rows, 5, *outputs(1, 5), None), asking.read_steps(rows, 5, *outputs(1, 5), None)),
            (plain.write_steps(rows, RECORDS[:1], None, one), asking.write_steps(rows, RECORDS[:1], None, one)),
            (plain.erase_steps(rows, one), asking.erase_steps(rows, one)),
        )  # fmt: skip
        assert all(sent(asked) == ASK + sent(straight) for straight, asked in pairs)
    assert sent(asking.erase_steps(BUCKETED, np.zeros(2, np.uint8))).count(ASK) == 2


def test_small_values_over_resp() -> None:
    codec = RespCodec()
    assert bytes(codec.get_step(b"kvemb:marker")[0].request) == b"*2\r\n$3\r\nGET\r\n$12\r\nkvemb:marker\r\n"
    assert bytes(codec.put_step(b"k", b"\r\n")[0].request) == b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$2\r\n\r\n\r\n"
    assert command(b"PING") == b"*1\r\n$4\r\nPING\r\n"


def test_mg_without_and_with_tokens() -> None:
    codec = MetaCodec()
    assert sent(codec.read_steps(KEYS, 5, *outputs(2, 5), None)) == b"mg " + A + b" v\r\nmg " + B + b" v\r\n"
    tokens = np.zeros(2, dtype=np.uint64)
    assert sent(codec.read_steps(KEYS, 5, *outputs(2, 5), tokens)) == b"mg " + A + b" v c\r\nmg " + B + b" v c\r\n"


def test_new_rows_must_not_exist_and_others_carry_their_token_and_what_fails_deletes_nothing() -> None:
    out = np.zeros(2, dtype=np.uint8)

    def written(tokens: list[int]) -> list[bytes]:
        steps = MetaCodec().write_steps(KEYS, RECORDS, np.array(tokens, dtype=np.uint64), out)
        return sent(steps).split(b" c\r\n")[:-1]

    new = [b"add " + A + b" 0 0 5\r\nabc\r\n\r\nmg " + A, b"add " + B + b" 0 0 5\r\nxyz\r\n\r\nmg " + B]
    assert written([0, 0]) == new
    assert written([0, 2**64 - 1]) == [new[0], b"cas " + B + b" 0 0 5 18446744073709551615\r\nxyz\r\n\r\nmg " + B]
    old = [b"cas " + A + b" 0 0 5 007\r\nabc\r\n\r\nmg " + A, b"cas " + B + b" 0 0 5 120\r\nxyz\r\n\r\nmg " + B]
    assert written([7, 120]) == old


def test_a_memcached_write_without_a_condition_is_never_sent() -> None:
    out = np.zeros(2, dtype=np.uint8)
    with pytest.raises(ValueError, match="need tokens"):
        MetaCodec().write_steps(KEYS, RECORDS, None, out)
    with pytest.raises(ValueError, match="come first"):
        MetaCodec().write_steps(KEYS, RECORDS, np.array([3, 0], dtype=np.uint64), out)


def test_md_and_small_values_over_meta() -> None:
    codec, out = MetaCodec(), np.zeros(2, dtype=np.uint8)
    assert sent(codec.erase_steps(KEYS, out)) == b"md " + A + b"\r\nmd " + B + b"\r\n"
    tokens = np.array([0, 120], dtype=np.uint64)  # 0: the row was missing when it was read
    assert sent(codec.erase_steps(KEYS, out, tokens)) == b"md " + A + b" C000\r\nmd " + B + b" C120\r\n"
    assert bytes(codec.get_step(b"kvemb:marker")[0].request) == b"mg kvemb:marker v\r\n"
    assert bytes(codec.put_step(b"k", b"EN\r\n")[0].request) == b"add k 0 0 4\r\nEN\r\n\r\nreplace k 0 0 4\r\nEN\r\n\r\n"


def test_every_codec_makes_no_step_of_no_rows() -> None:
    records = RECORDS[:0]
    for codec, none in ((RespCodec(), BUCKETED[:0]), (RespCodec(asking=True), BUCKETED[:0]), (MetaCodec(), KEYS[:0])):
        assert codec.read_steps(none, 5, *outputs(0, 5), None) == []
        assert codec.write_steps(none, records, np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.uint8)) == []
        assert codec.erase_steps(none, np.zeros(0, dtype=np.uint8)) == []


def test_chunked_steps_fill_their_own_rows_of_the_outputs() -> None:
    keys = RowKeys(b"tab", np.arange(5, dtype=np.uint64))
    out, found = outputs(5, 3)
    steps = MetaCodec(rows_per_step=2).read_steps(keys, 3, out, found, None)
    for index, step in enumerate(steps):
        stream = b"".join(b"VA 3\r\n%03d\r\n" % (10 * index + row) for row in range(2 if index < 2 else 1))
        assert step.reply.feed(np.frombuffer(stream, dtype=np.uint8)) == len(stream)
    assert found.all()
    assert [bytes(row) for row in out] == [b"000", b"001", b"010", b"011", b"020"]


@pytest.mark.parametrize("value", [0, 9, 10, 2**63, 2**64 - 1])
def test_decimals_are_padded_to_the_widest(value: int) -> None:
    digits = decimals(np.array([0, value, 1], dtype=np.uint64))
    assert [int(bytes(row)) for row in digits] == [0, value, 1]
    assert digits.shape[1] == len(str(max(value, 1)))


def test_columns_and_chunks_of_nothing() -> None:
    assert columns(0, b"GET ", KEYS[:0].encode()).shape == (0, 18)
    assert chunks(0, 7) == []
    assert decimals(np.zeros(0, dtype=np.uint64)).shape == (0, 1)
