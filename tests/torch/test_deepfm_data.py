"""The DeepFM example's data: readers of both formats, bad lines named, batches, the planted log, the metrics."""

import gzip
import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch.nn")  # the example as a whole needs it

from deepfm import criteo, libsvm, metrics, readers, synthetic
from deepfm.clicks import Clicks, batches, concatenate, split
from deepfm.readers import format_of, read_clicks
from hypothesis import given
from hypothesis import strategies as st

from kvemb.errors import InvalidInputError


def lists(clicks: Clicks) -> list[tuple[float, list[int], list[float]]]:
    """One (label, ids, values) per line."""
    lines = [slice(*pair) for pair in zip(clicks.offsets[:-1], clicks.offsets[1:], strict=True)]
    return [(float(y), clicks.ids[s].tolist(), clicks.values[s].tolist()) for y, s in zip(clicks.labels, lines, strict=True)]


def criteo_line(label: str = "1", numbers: str = "3", category: str = "68fd1e64") -> str:
    return "\t".join([label, *[numbers] * 13, *[category] * 26]) + "\n"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["0", "1", "-1", "+1", "1.0"]),
            st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.floats(-1e6, 1e6, width=32)), max_size=5),
        ),
        max_size=8,
    ),
    st.sampled_from(["\n", "\r\n", " \n", "\n\n", " # a comment: 3:x\n"]),
)
def test_libsvm_text_is_read_as_line_by_line(lines: list, end: str) -> None:
    text = "".join(f"{label} {' '.join(f'{i}:{v!r}' for i, v in features)}{end}" for label, features in lines)
    expected = [(float(float(y) > 0), [i for i, _ in fs], [np.float32(v).item() for _, v in fs]) for y, fs in lines]
    assert lists(libsvm.parse(text.encode(), "f", 1)) == expected


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("2 1:1", "label '2'"),
        ("nan 1:1", "label 'nan'"),
        ("click 1:1", "label 'click'"),
        ("1:1 2:1", "label '1:1'"),
        ("1 3", "feature '3'"),
        ("1 3:", "feature '3:'"),
        ("1 :3", "feature ':3'"),
        ("1 3::4", "feature '3::4'"),
        ("1 2:3:4", "feature '2:3:4'"),
        ("1 2:1 3:x", "feature '3:x'"),
        ("1 2.5:1", "feature '2.5:1'"),
        ("1 2:nan", "feature '2:nan'"),
        ("1 2:1e50", "feature '2:1e50'"),
        ("1 9223372036854775808:1", "feature '9223372036854775808:1'"),
        ("1 3: 4", "feature '3:'"),
        ("1 qid:4 2:1", "feature 'qid:4'"),
    ],
)
def test_a_bad_libsvm_line_is_named_with_its_fault(tmp_path: Path, line: str, fault: str) -> None:
    path = tmp_path / "train.txt"
    path.write_text(f"1 1:1\n\n# comment\n0 2:1\n{line}\n1 1:1 oops\n")
    with pytest.raises(InvalidInputError) as caught:
        read_clicks(path)
    assert str(caught.value).startswith(f"{path}:5: {fault}")


def test_criteo_fields_become_39_features_each(tmp_path: Path) -> None:
    path = tmp_path / "day_0"
    numbers = ["", "0", "-2", "1.5", *["7"] * 9]
    path.write_text("\t".join(["0", *numbers, "", *["a"] * 25]) + "\n" + criteo_line(category="a"))
    clicks = read_clicks(path)
    assert clicks.n_fields == 39
    (label, ids, values), (_, other_ids, _) = lists(clicks)
    assert label == 0.0
    logs = [math.copysign(math.log1p(abs(x)), x) for x in (0, -2, 1.5, *[7] * 9)]
    assert values == pytest.approx([1.0, *logs, *[1.0] * 26], rel=1e-6)
    assert len(set(ids)) == 39, "columns never share an id, even where their text is the same"
    assert [a == b for a, b in zip(ids, other_ids, strict=True)] == [False, *[True] * 12, False, *[True] * 25]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (criteo_line(label="-1"), "label '-1'"),
        (criteo_line(label=""), "label ''"),
        (criteo_line()[:-20] + "\n", "38 columns"),
        (criteo_line().replace("\n", "\tx\n"), "41 columns"),
        (criteo_line(numbers="many"), "expected 13 finite numbers"),
        (criteo_line(numbers="inf"), "expected 13 finite numbers"),
    ],
)
def test_a_bad_criteo_line_is_named_with_its_fault(tmp_path: Path, line: str, fault: str) -> None:
    path = tmp_path / "day_0"
    path.write_text(criteo_line() * 2 + line + criteo_line(label="bad"))
    with pytest.raises(InvalidInputError) as caught:
        read_clicks(path)
    assert str(caught.value).startswith(f"{path}:3: {fault}")


def test_criteo_text_that_is_no_utf8_is_named() -> None:
    with pytest.raises(InvalidInputError, match="f:12: "):
        criteo.parse(criteo_line().encode() + criteo_line().encode().replace(b"68fd1e64", b"\xff"), "f", 11)


@pytest.mark.parametrize("line", ["1 3:1 4:0.5\n", criteo_line()])
def test_files_larger_than_a_block_and_gzip_read_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    text = ("\n" + line) * 50 + line.rstrip("\n")
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    whole = lists(read_clicks(tmp_path / "a.txt"))
    assert len(whole) == 51
    for size in (1, 7, 64):
        monkeypatch.setattr(readers, "BLOCK_BYTES", size)
        assert lists(read_clicks(tmp_path / "a.txt")) == whole
        assert lists(read_clicks(tmp_path / "a.txt.gz")) == whole


def test_a_bad_line_keeps_its_number_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "BLOCK_BYTES", 10)
    path = tmp_path / "a.txt"
    path.write_text("1 3:1\n" * 40 + "1 3\n")
    with pytest.raises(InvalidInputError, match=r"a\.txt:41: "):
        read_clicks(path)


@pytest.mark.parametrize(("content", "fault"), [("", "no lines"), ("\n \n", "no lines"), ("\na,b,c\n", ":2: neither")])
def test_a_file_without_a_log_is_refused(tmp_path: Path, content: str, fault: str) -> None:
    path = tmp_path / "x"
    path.write_text(content)
    with pytest.raises(InvalidInputError, match=fault):
        read_clicks(path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gz").write_text("1 3:1\n")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"1 3:1\n" * 1000)[:-12])
    for name in ("none", "x.gz", "cut.gz"):
        for read in (read_clicks, format_of):
            if (read, name) != (format_of, "cut.gz"):  # its first line can be read
                with pytest.raises(InvalidInputError, match=f"{name}: cannot be read: [A-Z][a-z]"):
                    read(tmp_path / name)


def random_log(n_lines: int) -> Clicks:
    rng = np.random.default_rng(n_lines)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 4, n_lines))])
    ids = rng.integers(0, 99, offsets[-1])
    return Clicks(rng.integers(0, 2, n_lines).astype(np.float32), offsets, ids, rng.random(len(ids)).astype(np.float32))


def test_batches_hold_every_line_once_in_the_given_order() -> None:
    log = random_log(23)
    order = np.random.default_rng(0).permutation(23)
    taken = [line for batch in batches(log, 5, order) for line in lists(batch)]
    assert taken == [lists(log)[at] for at in order]
    assert [len(batch) for batch in batches(log, 5)] == [5, 5, 5, 5, 3]
    assert lists(concatenate(list(batches(log, 5)))) == lists(log)


def test_a_split_parts_all_lines() -> None:
    kept, held_out = split(100, 0.25, seed=1)
    assert len(held_out) == 25
    assert sorted([*kept, *held_out]) == list(range(100))


def test_the_number_of_fields_is_known_only_where_all_lines_agree() -> None:
    assert synthetic.draw(10, seed=0)[0].n_fields == len(synthetic.SIZES)
    assert random_log(30).n_fields is None


def test_the_planted_log_follows_its_probabilities_and_its_seed() -> None:
    log, p = synthetic.draw(200_000, seed=5)
    assert abs(float((log.labels - p).mean())) < 5 * math.sqrt(0.25 / len(p))
    for low in np.arange(0.1, 0.9, 0.1):
        there = (p >= low) & (p < low + 0.1)
        assert abs(float((log.labels[there] - p[there]).mean())) < 5 * math.sqrt(0.25 / there.sum())
    assert np.array_equal(log.ids, synthetic.draw(200_000, seed=5)[0].ids)
    assert not np.array_equal(log.labels, synthetic.draw(200_000, seed=6)[0].labels)
    assert len(np.unique(log.ids)) > 0.95 * sum(synthetic.SIZES)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), min_size=1, max_size=30))
def test_auc_is_the_share_of_pairs_in_the_right_order(pairs: list[tuple[bool, int]]) -> None:
    labels, scores = np.array([float(y) for y, _ in pairs]), np.array([s / 7 for _, s in pairs])
    clicks, others = scores[labels > 0], scores[labels == 0]
    if len(clicks) == 0 or len(others) == 0:
        assert math.isnan(metrics.auc(labels, scores))
        return
    wins = [1.0 if c > o else 0.5 if c == o else 0.0 for c in clicks for o in others]
    assert metrics.auc(labels, scores) == pytest.approx(sum(wins) / len(wins))


@given(st.lists(st.tuples(st.booleans(), st.floats(1e-6, 1 - 1e-6)), min_size=1, max_size=30))
def test_log_loss_and_rmse_follow_their_definitions(pairs: list[tuple[bool, float]]) -> None:
    labels, p = np.array([float(y) for y, _ in pairs]), np.array([q for _, q in pairs])
    assert metrics.log_loss(labels, p) == pytest.approx(-sum(math.log(q) if y else math.log1p(-q) for y, q in pairs) / len(pairs))
    assert metrics.rmse(labels, p) == pytest.approx(math.sqrt(sum((y - q) ** 2 for y, q in pairs) / len(pairs)))


def test_log_loss_stays_finite_for_certain_and_wrong() -> None:
    assert metrics.log_loss(np.array([0.0, 1.0]), np.array([1.0, 0.0])) == pytest.approx(-math.log(1e-7), rel=1e-6)
