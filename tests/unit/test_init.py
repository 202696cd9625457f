"""First values of rows: golden bits, a scalar reference, purity, distributions, validation; the inverse normal."""

import ast
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvemb.init.initializer
from kvemb import init
from kvemb.arrays.hashing import digest64
from kvemb.errors import InvalidInputError
from kvemb.init import Initializer, first_draws
from kvemb.init.first_draws import ALGORITHMS

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = [json.loads((Path(__file__).parent / "golden" / f"init_v{version}.json").read_text()) for version in ALGORITHMS]
NORMAL = statistics.NormalDist()
ALL = [
    init.zeros(),
    init.constant(0.25),
    init.uniform(-1.0, 3.0),
    init.normal(0.5, 2.0),
    init.truncated_normal(-1.0, 0.5),
    init.xavier_uniform(2.0, fan_in=24, fan_out=8),
    init.xavier_normal(2.0, fan_in=24, fan_out=8),
]
RANDOM = ALL[2:]
each_kind = pytest.mark.parametrize("initializer", ALL, ids=lambda i: i.kind)
each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
each_random_kind = pytest.mark.parametrize("initializer", RANDOM, ids=lambda i: i.kind)


def some_ids(n, seed=0):
    return np.random.default_rng(seed).integers(0, 2**64, n, dtype=np.uint64)


def rows(initializer, ids, dim, table="user", seed=7, **how):
    return initializer.rows(np.asarray(ids, np.uint64), dim, table=table, seed=seed, **how)


def scalar_word(algorithm, table, seed, id_, counter):
    """A word of the counter generator, written a second time in Python integers."""

    def mix(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    key_0, key_1 = (digest64("kvemb.init", algorithm, part, table, seed) for part in ("id", "stream"))
    return mix((mix(id_ ^ key_0) + key_1 + (counter + 1) * 0x9E3779B97F4A7C15) % 2**64)


def scalar_uniform(algorithm, table, seed, id_, column):
    """The uniform number of a column: of its own word, or of its quarter of a word."""
    if algorithm == 1:
        return (2 * (scalar_word(1, table, seed, id_, column) >> 12) + 1) / 2**53
    lane = scalar_word(2, table, seed, id_, column // 4) >> 16 * (column % 4) & 0xFFFF
    return (2 * lane + 1) / 2**17


# --- the same bits for ever ---


@pytest.mark.parametrize(
    ("golden", "case"),
    [
        pytest.param(golden, case, id=f"{golden['algorithm_version']}-{case['initializer']['kind']}")
        for golden in GOLDEN
        for case in golden["cases"]
    ],
)
def test_rows_are_the_golden_bits_of_their_algorithm(golden, case):
    initializer, algorithm = Initializer.from_dict(case["initializer"]), golden["algorithm_version"]
    got = rows(initializer, golden["ids"], golden["dim"], golden["table"], golden["seed"], algorithm=algorithm)
    assert [row.astype(">f4").tobytes().hex() for row in got] == case["rows"]


def test_golden_vectors_cover_every_kind_and_algorithm():
    assert [golden["algorithm_version"] for golden in GOLDEN] == list(ALGORITHMS)
    assert max(ALGORITHMS) == init.ALGORITHM_VERSION
    for golden in GOLDEN:
        assert {case["initializer"]["kind"] for case in golden["cases"]} == {i.kind for i in ALL} | {"columns"}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(st.integers(0, 2**64 - 1), st.integers(), st.text(max_size=5))
def test_values_equal_the_scalar_reference(algorithm, id_, seed, table):
    u = [scalar_uniform(algorithm, table, seed, id_, c) for c in range(7)]
    got = {each.kind: rows(each, [id_], 7, table, seed, algorithm=algorithm)[0] for each in (init.uniform(0, 1), init.normal(0, 1))}
    assert got["uniform"].tolist() == [float(np.float32(x)) for x in u]
    np.testing.assert_allclose(got["normal"], [NORMAL.inv_cdf(x) for x in u], 1e-7)
    low = NORMAL.cdf(-2)
    cut = [NORMAL.inv_cdf(low + x * (1 - 2 * low)) for x in u]
    np.testing.assert_allclose(rows(init.truncated_normal(0, 1), [id_], 7, table, seed, algorithm=algorithm)[0], cut, 1e-7, 1e-15)


def test_rows_are_the_same_bits_without_the_vector_extensions_of_this_cpu():
    program = (
        "import hashlib, numpy as np; from kvemb import init\n"
        "ids = np.arange(5000, dtype=np.uint64)\n"
        "kinds = init.normal(), init.truncated_normal(), init.uniform()\n"
        "made = [i.rows(ids, 16, table='t', seed=1, algorithm=a) for i in kinds for a in (1, 2)]\n"
        "print(hashlib.sha256(b''.join(m.tobytes() for m in made)).hexdigest())\n"
    )
    ids = np.arange(5000, dtype=np.uint64)
    kinds = init.normal(), init.truncated_normal(), init.uniform()
    made = [i.rows(ids, 16, table="t", seed=1, algorithm=a) for i in kinds for a in ALGORITHMS]
    here = hashlib.sha256(b"".join(m.tobytes() for m in made)).hexdigest()
    simd = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    env = {**os.environ, "NPY_DISABLE_CPU_FEATURES": " ".join(simd), "PYTHONPATH": str(ROOT)}
    plain = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=200, check=True)
    assert plain.stdout.strip() == here


@pytest.mark.parametrize("module", [init, kvemb.init.initializer, first_draws], ids=lambda m: m.__name__)
def test_no_function_is_called_whose_bits_depend_on_the_cpu(module):
    tree = ast.parse(Path(module.__file__).read_text())
    called = {f"{n.value.id}.{n.attr}" for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)}
    elementary = {name for name in called if name.startswith(("np.", "math."))}
    portable = {
        "np.add", "np.subtract", "np.multiply", "np.divide", "np.sqrt", "math.sqrt",
        "np.maximum", "np.clip", "np.where", "np.right_shift", "np.empty", "np.empty_like", "np.arange", "np.uint16",
        "np.full", "np.array", "np.ascontiguousarray", "np.flatnonzero", "np.finfo", "np.ndarray",
        "np.float32", "np.float64", "np.uint64", "np.integer", "np.floating",
    }  # fmt: skip
    assert elementary <= portable


# --- a pure function of (table, seed, id, column) ---


@each_algorithm
@each_kind
def test_a_row_does_not_depend_on_its_batch(initializer, algorithm):
    ids = some_ids(5_000)
    whole = rows(initializer, ids, 16, algorithm=algorithm)
    order = np.random.default_rng(1).permutation(5_000)
    for some in (order, [4_321], [3, 3]):
        np.testing.assert_array_equal(rows(initializer, ids[some], 16, algorithm=algorithm), whole[some])


@each_algorithm
@each_kind
def test_a_column_does_not_depend_on_the_number_of_columns(initializer, algorithm):
    ids = some_ids(300)
    wide = rows(initializer, ids, 40_000, algorithm=algorithm)
    for dim in (*range(1, 70), 127, 300):
        np.testing.assert_array_equal(rows(initializer, ids, dim, algorithm=algorithm), wide[:, :dim])


@each_random_kind
def test_table_seed_id_and_column_each_change_the_value(initializer):
    ids = np.arange(1, 65, dtype=np.uint64)
    base = rows(initializer, ids, 16)
    for other in (
        rows(initializer, ids, 16, table="item"),
        rows(initializer, ids, 16, seed=8),
        rows(initializer, ids + np.uint64(64), 16),
        np.roll(base, 1, axis=1),
    ):
        assert (other != base).mean() > 0.999
        assert abs(np.corrcoef(other.ravel(), base.ravel())[0, 1]) < 5 / math.sqrt(base.size)


def test_signed_ids_seen_as_unsigned_do_not_collide():
    ids = np.array([-1, 1, -(2**63), 2**63 - 1], np.int64).view(np.uint64)
    assert len(np.unique(rows(init.uniform(), ids, 1))) == 4


@each_kind
def test_rows_have_their_shape_and_dtype_and_leave_ids_alone(initializer):
    ids = some_ids(3)
    before = ids.copy()
    made = rows(initializer, ids, 5)
    assert made.shape == (3, 5)
    assert made.dtype == np.float32
    assert made.flags.c_contiguous
    assert made.flags.writeable
    np.testing.assert_array_equal(ids, before)
    assert rows(initializer, [], 5).shape == (0, 5)


# --- parts of a row ---


def test_a_part_has_the_bits_of_its_columns_in_a_whole_row():
    ids = some_ids(3_000)
    parts = init.columns(*((width, each) for width, each in zip((1, 3, 2, 4, 1, 1, 300), [*ALL[1:], ALL[0]], strict=True)))
    got, first = rows(parts, ids, 312), 0
    for width, each in parts.parts:
        np.testing.assert_array_equal(got[:, first : first + width], rows(each, ids, 312)[:, first : first + width])
        first += width
    np.testing.assert_array_equal(rows(parts, ids[7:9], 312), got[7:9])
    assert got.flags.c_contiguous


def test_changing_one_part_leaves_the_others_alone_and_equal_parts_do_not_repeat_each_other():
    ids, noise = some_ids(500), init.normal(std=1.0)
    one, other = rows(init.columns((1, init.zeros()), (4, noise)), ids, 5), rows(init.columns((1, init.uniform()), (4, noise)), ids, 5)
    np.testing.assert_array_equal(one[:, 1:], other[:, 1:])
    assert (one[:, 0] != other[:, 0]).all()
    twice = rows(init.columns((4, noise), (4, noise)), ids, 8)
    assert (twice[:, :4] != twice[:, 4:]).all()
    np.testing.assert_array_equal(twice, rows(noise, ids, 8))


def test_the_fans_of_a_part_are_its_own_width():
    got = rows(init.columns((90, init.zeros()), (10, init.xavier_uniform())), some_ids(50), 100)
    expected = rows(init.xavier_uniform(fan_in=10, fan_out=10), some_ids(50), 100)
    np.testing.assert_array_equal(got[:, 90:], expected[:, 90:])


def test_parts_survive_their_dict_form_and_differ_by_width_kind_and_order():
    bias, noise = init.zeros(), init.normal(std=0.5)
    parts = init.columns((np.int32(1), bias), (2, noise))
    assert parts.to_dict() == {
        "kind": "columns",
        "parts": [{"width": 1, "kind": "zeros"}, {"width": 2, "kind": "normal", "mean": 0.0, "std": 0.5}],
    }
    assert Initializer.from_dict(json.loads(json.dumps(parts.to_dict()))) == parts
    others = [init.columns((2, bias), (1, noise)), init.columns((2, noise), (1, bias)), init.columns((1, bias), (2, bias)), noise]
    assert len({parts, *others}) == 5


@pytest.mark.parametrize("dim", [1, 2, 4])
def test_parts_of_another_width_together_than_dim_are_refused(dim):
    with pytest.raises(InvalidInputError, match=rf"2 parts give 3 columns together, dim is {dim}"):
        rows(init.columns((1, init.zeros()), (2, init.normal())), [1], dim)


@pytest.mark.parametrize("width", [0, -1, True, 1.0, "1", None])
def test_a_width_that_is_no_positive_integer_is_refused_with_its_place(width):
    with pytest.raises(InvalidInputError, match=r"initializer\.parts\[1\]: width must be an integer >= 1"):
        init.columns((1, init.zeros()), (width, init.zeros()))
    with pytest.raises(InvalidInputError, match=r"initializer\.parts\[0\]: width must be an integer >= 1"):
        Initializer.from_dict({"kind": "columns", "parts": [{"width": width, "kind": "zeros"}]})


@pytest.mark.parametrize("given", [(), 5, (init.zeros(), 1), (1,), (1, "zeros"), init.zeros()])
def test_what_is_no_part_is_refused(given):
    with pytest.raises(InvalidInputError, match=r"initializer\.parts\[0\] must be \(width, initializer\)"):
        init.columns(given)


def test_parts_within_parts_are_refused():
    inner = init.columns((1, init.zeros()), (1, init.normal()))
    with pytest.raises(InvalidInputError, match=r"initializer\.parts\[1\] has parts itself; write them all side by side"):
        init.columns((1, init.zeros()), (2, inner))
    with pytest.raises(InvalidInputError, match=r"parts\[0\] has parts itself"):
        Initializer.from_dict({"kind": "columns", "parts": [{"width": 2, **inner.to_dict()}]})
    with pytest.raises(InvalidInputError, match="normal takes no parts"):
        Initializer("normal", parts=((1, init.zeros()),))


# --- distributions ---


def uniform_cdf(x, low, high):
    return np.clip((x - low) / (high - low), 0, 1)


def normal_cdf(x, mean, std):
    return np.array([NORMAL.cdf(z) for z in (x - mean) / std])


def truncated_cdf(x, mean, std):
    below = NORMAL.cdf(-2)
    return (normal_cdf(x, mean, std) - below) / (1 - 2 * below)


DISTRIBUTIONS = [  # initializer, mean, std, cdf and its arguments
    (init.uniform(-1.0, 3.0), 1.0, 4 / math.sqrt(12), uniform_cdf, (-1.0, 3.0)),
    (init.normal(0.5, 2.0), 0.5, 2.0, normal_cdf, (0.5, 2.0)),
    (init.truncated_normal(-1.0, 0.5), -1.0, 0.5 * 0.879626, truncated_cdf, (-1.0, 0.5)),
    (init.xavier_uniform(2.0, 24, 8), 0.0, 0.5, uniform_cdf, (-2 * math.sqrt(6 / 32), 2 * math.sqrt(6 / 32))),
    (init.xavier_normal(2.0, 24, 8), 0.0, 0.5, normal_cdf, (0.0, 0.5)),
    (init.xavier_uniform(), 0.0, math.sqrt(2 / 20), uniform_cdf, (-math.sqrt(6 / 20), math.sqrt(6 / 20))),
    (init.xavier_normal(fan_in=30), 0.0, math.sqrt(2 / 40), normal_cdf, (0.0, math.sqrt(2 / 40))),
]


@pytest.mark.parametrize(("initializer", "mean", "std", "cdf", "arguments"), DISTRIBUTIONS, ids=lambda p: getattr(p, "kind", ""))
@pytest.mark.parametrize("ids", [np.arange(10_000, dtype=np.uint64), some_ids(10_000)], ids=["consecutive", "random"])
def test_values_follow_their_distribution(ids, initializer, mean, std, cdf, arguments):
    sample = np.sort(rows(initializer, ids, 10).ravel().astype(np.float64))
    n = sample.size
    assert abs(sample.mean() - mean) < 4.5 * std / math.sqrt(n)
    assert abs(sample.std() / std - 1) < 4.5 * math.sqrt(0.5 / n)  # Of a normal; the others' is smaller.
    steps = np.arange(n + 1) / n
    expected = cdf(sample, *arguments)
    distance = max(np.abs(expected - steps[:-1]).max(), np.abs(expected - steps[1:]).max())
    assert distance < 2.2 / math.sqrt(n)  # Kolmogorov: exceeded once in 8,000 samples.


def test_a_truncated_normal_never_leaves_two_std():
    sample = rows(init.truncated_normal(0.0, 1.0), np.arange(100_000), 1)
    assert np.abs(sample).max() <= 2.0
    assert np.abs(sample).max() > 1.99


def test_degenerate_distributions_are_constants():
    ids = some_ids(10)
    assert (rows(init.zeros(), ids, 3) == 0).all()
    assert (rows(init.constant(-1.5), ids, 3) == -1.5).all()
    assert (rows(init.uniform(0.5, 0.5), ids, 3) == 0.5).all()
    assert (rows(init.normal(0.5, 0.0), ids, 3) == 0.5).all()


def test_the_largest_accepted_values_stay_finite():
    top = float(np.finfo(np.float32).max)
    for initializer in (init.uniform(-top, top), init.normal(0.0, top / 8.6), init.constant(top)):
        assert np.isfinite(rows(initializer, some_ids(1_000), 4)).all()


# --- the inverse normal function ---


EDGES = [2.0**-53, 1 - 2.0**-53, 0.075, np.nextafter(0.075, 0), 0.925, math.exp(-25), 1 - 2.0**-36, 1e-300, 0.5]


def test_the_inverse_normal_function_agrees_with_the_standard_library():
    u = np.concatenate([np.random.default_rng(0).random(50_000), 10.0 ** -np.linspace(1, 300, 2_000), EDGES])
    u = u[(u > 0) & (u < 1)]
    expected = np.array([NORMAL.inv_cdf(x) for x in u])
    np.testing.assert_allclose(first_draws.inverse_normal_cdf(u), expected, rtol=2e-15, atol=0)


@given(st.integers(0, 2**52 - 1))
def test_the_inverse_normal_function_is_odd_about_one_half(k):
    u = (k + 0.5) * 2.0**-52
    low, high = first_draws.inverse_normal_cdf(np.array([u, 1 - u]))
    assert low == -high
    assert abs(low) < 8.5


@given(st.floats(min_value=sys.float_info.min, allow_infinity=False))
def test_the_logarithm_has_a_relative_error_below_1e_15(x):
    assert math.isclose(first_draws.portable_log(np.array([x]))[0], math.log(x), rel_tol=1e-15)


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_the_functions_keep_shape_and_argument(shape):
    u = np.full(shape, 0.01)
    assert first_draws.inverse_normal_cdf(u).shape == shape
    assert first_draws.portable_log(u).shape == shape
    assert (u == 0.01).all()


def test_views_that_are_not_contiguous_are_taken():
    u = np.random.default_rng(0).random((40, 30))
    for function in (first_draws.inverse_normal_cdf, first_draws.portable_log):
        np.testing.assert_array_equal(function(u.T[::2]), function(u).T[::2])


# --- definitions ---


@each_kind
def test_a_definition_survives_its_dict_and_yaml_and_json_forms(initializer):
    d = initializer.to_dict()
    assert {type(v) for v in d.values()} <= {str, float, int}
    assert Initializer.from_dict(json.loads(json.dumps(d))) == initializer
    assert hash(Initializer.from_dict(d)) == hash(initializer)


def test_the_dict_form_is_flat_and_canonical():
    assert init.normal(std=0.01).to_dict() == {"kind": "normal", "mean": 0.0, "std": 0.01}
    one = Initializer.from_dict({"std": np.float64(1), "kind": "normal", "mean": -0.0})
    assert json.dumps(one.to_dict()) == '{"kind": "normal", "mean": 0.0, "std": 1.0}'
    assert Initializer.from_dict({"kind": "xavier_normal", "fan_in": 3.0}).to_dict()["fan_in"] == 3


@each_kind
def test_parameters_left_out_take_the_constructors_defaults(initializer):
    if initializer.kind == "constant":
        with pytest.raises(InvalidInputError, match="needs a 'value'"):
            Initializer.from_dict({"kind": "constant"})
    else:
        assert Initializer.from_dict({"kind": initializer.kind}) == getattr(init, initializer.kind)()


@pytest.mark.parametrize(
    ("d", "message"),
    [
        ({}, "'kind'"),
        ("normal", "'kind'"),
        ({"kind": "gaussian"}, "'gaussian'; known: zeros, constant"),
        ({"kind": None}, "None"),
        ({"kind": "normal", "stdev": 1.0}, "'stdev'; it takes: mean, std"),
        ({"kind": "zeros", "value": 1.0}, "it takes: nothing"),
        ({"kind": "normal", "std": "0.1"}, "std must be a number"),
        ({"kind": "normal", "std": None}, "std must be a number"),
        ({"kind": "normal", "std": True}, "std must be a number"),
        ({"kind": "normal", "std": -0.1}, "std must be >= 0"),
        ({"kind": "normal", "mean": math.nan}, "mean must be finite"),
        ({"kind": "uniform", "high": math.inf}, "high must be finite"),
        ({"kind": "constant", "value": 1e39}, "value must be finite"),
        ({"kind": "constant", "value": 10**400}, "value must be finite"),
        ({"kind": "uniform", "low": 1.0}, r"low 1.0 is above high 0.05"),
        ({"kind": "normal", "std": 1e38}, "range of float32"),
        ({"kind": "xavier_normal", "gain": 1e38}, "range of float32"),
        ({"kind": "columns"}, "columns needs at least one part"),
        ({"kind": "columns", "parts": []}, "columns needs at least one part"),
        ({"kind": "columns", "parts": {"width": 1}}, "parts must be a list"),
        ({"kind": "columns", "parts": [{"kind": "zeros"}]}, r"parts\[0\] must be a mapping with a 'width' and a 'kind'"),
        ({"kind": "columns", "parts": [{"width": 1, "kind": "zeros"}, 7]}, r"parts\[1\] must be a mapping with a 'width'"),
        ({"kind": "columns", "parts": [{"width": 1, "kind": "normal", "std": -1}]}, r"parts\[0\]: initializer normal: std"),
        ({"kind": "columns", "std": 1.0, "parts": [{"width": 1, "kind": "zeros"}]}, "takes no 'std'; it takes: parts"),
        ({"kind": "zeros", "parts": []}, "zeros takes no 'parts'"),
        ({"kind": "xavier_normal", "fan_in": 0}, "fan_in must be an integer >= 1"),
        ({"kind": "xavier_normal", "fan_out": 2.5}, "fan_out must be an integer >= 1"),
        ({"kind": "xavier_normal", "fan_out": math.inf}, "fan_out must be an integer >= 1"),
    ],
)
def test_a_wrong_definition_is_refused_naming_what_is_wrong(d, message):
    with pytest.raises(InvalidInputError, match=message):
        Initializer.from_dict(d)


@pytest.mark.parametrize("ids", [[1, 2], np.array([1, 2]), np.array([1.0]), np.zeros((2, 2), np.uint64)])
@each_kind
def test_ids_that_are_not_a_flat_uint64_array_are_refused(initializer, ids):
    with pytest.raises(InvalidInputError, match="uint64"):
        initializer.rows(ids, 4, table="user", seed=0)


def test_a_dim_below_one_is_refused():
    with pytest.raises(InvalidInputError, match="dim"):
        init.zeros().rows(some_ids(1), 0, table="user", seed=0)
