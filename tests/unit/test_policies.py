"""Policies of a table as values: what they take, their plain form, and which of them holds for a push."""

from collections.abc import Callable

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvemb
from kvemb import admit, evict
from kvemb.admit import Admission
from kvemb.coordination.registry_format import decode_registry, encode_registry
from kvemb.errors import InvalidInputError, ProtocolError
from kvemb.evict import Eviction
from kvemb.schema.policies import KEPT_CHANGES, NO_POLICIES, Policies, PolicyChange, as_of
from kvemb.schema.table_def import TableDef

TABLE = TableDef("user", 4, kvemb.optim.sgd(1.0), kvemb.init.zeros())
ADMISSIONS = st.one_of(
    st.just(admit.any()),
    st.builds(admit.after, st.integers(1, 255)),
    st.builds(admit.probability, st.floats(0, 1, exclude_min=True)),
)
SINGLE = st.one_of(
    st.builds(lambda n: evict.older_than(days=n), st.floats(0, 1e6, exclude_min=True)),
    st.builds(lambda n: evict.older_than(batches=n), st.integers(1, 2**40)),
    st.builds(evict.l2_below, st.floats(0, 1e6, exclude_min=True)),
    st.builds(evict.keep, st.integers(1, 2**40)),
)
EVICTIONS = st.one_of(
    st.just(evict.never()),
    st.recursive(
        SINGLE, lambda one: st.one_of(st.builds(lambda a, b: a | b, one, one), st.builds(lambda a, b: a & b, one, one)), max_leaves=8
    ),
)


@given(ADMISSIONS, EVICTIONS)
def test_policies_survive_messages_and_the_registry(admission: Admission, eviction: Eviction) -> None:
    policies = Policies(admission, eviction)
    assert NO_POLICIES.updated(msgpack.unpackb(msgpack.packb(policies.to_dict()))) == policies
    changes = {TABLE.key: ((3, NO_POLICIES), (8, policies))}
    assert decode_registry(encode_registry(9, [TABLE], (), changes)).policies == changes
    assert eval(repr(eviction), vars(evict)) == eviction
    assert eval(repr(admission), vars(admit)) == admission


def test_a_registry_without_policies_has_the_bytes_that_older_releases_read() -> None:
    assert msgpack.unpackb(encode_registry(3, [TABLE]))[:2] == ["kvemb-tables", 1]


@pytest.mark.parametrize(
    "of", [[["user", [[1, {"admission": {"kind": "after", "n": 0}}]]]], [["user", 7]], [7], [["user", [[1, {"x": {}}]]]]]
)
def test_a_registry_of_other_policies_is_refused(of: object) -> None:
    fields = msgpack.unpackb(encode_registry(3, [TABLE], (), {TABLE.key: ((3, NO_POLICIES),)}))
    with pytest.raises(ProtocolError, match="later release"):
        decode_registry(msgpack.packb([*fields[:-1], of]))


@pytest.mark.parametrize("n", [0, -1, 256, 2.5, True, "3", None])
def test_a_count_that_no_admission_takes_is_refused(n: object) -> None:
    with pytest.raises(InvalidInputError, match="1 to 255"):
        admit.after(n)  # type: ignore[arg-type]


@pytest.mark.parametrize("p", [0.0, -0.1, 1.1, float("nan"), True, "x"])
def test_a_probability_that_no_admission_takes_is_refused(p: object) -> None:
    with pytest.raises(InvalidInputError, match="above 0 and at most 1"):
        admit.probability(p)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: evict.older_than(),
        lambda: evict.older_than(days=1, batches=1),
        lambda: evict.older_than(days=float("inf")),
        lambda: evict.older_than(batches=1.5),  # type: ignore[arg-type]
        lambda: evict.older_than(batches=0),
        lambda: evict.l2_below(0.0),
        lambda: evict.keep(0),
        lambda: evict.keep(True),
        lambda: evict.never() | evict.keep(1),
        lambda: Eviction("all_of", of=(evict.keep(1),)),
        lambda: Eviction("keep", "days", 1),
        lambda: Eviction("other"),
        lambda: Eviction.from_dict({"kind": "keep", "rows": 1, "days": 2}),
        lambda: Eviction.from_dict({"kind": "any_of", "of": 7}),
        lambda: Eviction.from_dict([1]),
        lambda: Admission.from_dict({"kind": "after", "p": 3}),
        lambda: Admission.from_dict({"kind": "any", "n": 3}),
        lambda: Admission("any", 3),
        lambda: PolicyChange(eviction=admit.any()),  # type: ignore[arg-type]
        lambda: PolicyChange(3),  # type: ignore[arg-type]
        lambda: NO_POLICIES.updated({"admissions": {}}),
    ],
)
def test_values_that_no_policy_takes_are_refused(make: object) -> None:
    with pytest.raises(InvalidInputError):
        make()  # type: ignore[operator]


def test_sixteen_policies_are_combined_and_no_more() -> None:
    policy = evict.keep(1)
    for n in range(2, 17):
        policy = policy | evict.keep(n)
    with pytest.raises(InvalidInputError, match="at most 16"):
        policy & evict.l2_below(1)


@pytest.mark.parametrize("combine", [lambda a, b: a and b, lambda a, b: a or b, lambda a, b: not a])
def test_policies_are_not_combined_by_words_that_would_take_one_of_them(combine: Callable[[Eviction, Eviction], object]) -> None:
    with pytest.raises(InvalidInputError, match=r"combine policies by & and \|, not by"):
        combine(evict.keep(10), evict.older_than(days=1))


def test_a_push_is_decided_by_the_policies_that_its_trainer_can_have_known() -> None:
    changes = tuple((at, Policies(admit.after(at))) for at in (3, 8, 9))
    assert [as_of(changes, serial).admission.value for serial in (1, 3, 7, 8, 9, 99, 0)] == [3, 3, 3, 8, 9, 9, 9]
    assert as_of((), 7) == NO_POLICIES
    assert KEPT_CHANGES >= 4
