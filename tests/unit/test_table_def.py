"""A table's definition: which numbers are integers, and that messages name the table."""

import json
from dataclasses import replace

import numpy as np
import pytest

from kvemb import init, optim
from kvemb.coordination.registry_format import Dropped, decode_registry, encode_registry
from kvemb.errors import InvalidInputError, TableMismatchError
from kvemb.schema.buckets import BucketKeys
from kvemb.schema.keys import RowKeys
from kvemb.schema.pages import PagedKeys, page_layout
from kvemb.schema.table_def import TableDef


def definition(**changed: object) -> TableDef:
    return TableDef(**{"name": "user", "dim": 4, "optimizer": optim.sgd(), "initializer": init.zeros(), **changed})  # type: ignore[arg-type]


def test_integers_of_numpy_are_integers() -> None:
    given = definition(dim=np.int64(4), seed=np.uint8(3))
    assert given == definition(seed=3)
    assert (type(given.dim), type(given.seed)) == (int, int)
    assert given.schema == definition(seed=3).schema


@pytest.mark.parametrize("field", ["dim", "seed"])
@pytest.mark.parametrize("value", [True, np.True_, 4.0, "4", None, -1, 1 << 63])
def test_other_values_are_no_integers(field: str, value: object) -> None:
    with pytest.raises(InvalidInputError, match=f"table 'user': {field} is"):
        definition(**{field: value})


def test_an_unknown_storage_dtype_names_the_table() -> None:
    with pytest.raises(InvalidInputError, match="table 'user': unknown storage dtype 'float8'"):
        definition(dtype="float8")


# A released definition's digest and registry must never change: its rows and its cluster would be refused.
GOLDEN_REGISTRY = (
    "94ac6b76656d622d7461626c65730101918aa46e616d65a475736572a364696d04a56474797065a7666c6f61743332a869645f6474797065a5696e743634a96f7074"
    "696d697a657285a46b696e64a3736764a26c72cb3f50624dd2f1a9fca86d6f6d656e74756dcb0000000000000000ac7765696768745f6465636179cb000000000000"
    "0000a86e65737465726f76c2ab696e697469616c697a657281a46b696e64a57a65726f73a47365656400a6726564756365a373756dab7461675f617474656d707400"
    "a96e5f6275636b657473cd0100"
)
BUCKETS = "a96e5f6275636b657473cd0100"
GOLDEN_REGISTRY_2 = GOLDEN_REGISTRY.replace("918aa4", "918ba4", 1).replace(BUCKETS, "ae696e69745f616c676f726974686d02" + BUCKETS)


def test_golden_definitions() -> None:
    """Of the time when first values had one algorithm, which was not written down, and of now."""
    adam = TableDef("item", 16, optim.adam(), init.uniform(), dtype="float16", id_dtype="uint64", seed=3, reduce="mean")
    for algorithm, schemas, registry in ((1, [228, 234, 126], GOLDEN_REGISTRY), (2, [128, 43, 157], GOLDEN_REGISTRY_2)):
        first, second = definition(init_algorithm=algorithm), replace(adam, init_algorithm=algorithm)
        assert [first.schema, second.schema, definition(num_ids=1000, init_algorithm=algorithm).schema] == schemas
        assert encode_registry(1, [first]).hex() == registry
        assert decode_registry(bytes.fromhex(registry))[1] == {"user": first}
    assert definition().init_algorithm == 2


def test_a_definition_that_names_no_algorithm_has_the_first_and_its_rows() -> None:
    drawn = definition(initializer=init.normal(), dtype="bfloat16")
    fields = drawn.to_dict()
    del fields["init_algorithm"]
    earlier, ids = TableDef.from_dict(fields), np.arange(9, dtype=np.uint64)
    assert earlier == replace(drawn, init_algorithm=1)
    assert "init_algorithm" not in earlier.to_dict()
    for one in (earlier, drawn):
        rows = one.initializer.rows(ids, 4, table="user", seed=0, dtype="bfloat16", algorithm=one.init_algorithm)
        np.testing.assert_array_equal(one.initial_rows(ids), rows)
    assert (earlier.initial_rows(ids) != drawn.initial_rows(ids)).all()
    with pytest.raises(TableMismatchError, match="drop the table first"):
        drawn.require_same(earlier)
    with pytest.raises(TableMismatchError, match="Open it with its own definition"):
        drawn.require_same(replace(earlier, seed=5))
    earlier.require_same(drawn.opened_as(earlier))


@pytest.mark.parametrize(
    ("value", "says"), [(3, "drawn by algorithm 3, this kvemb knows 1 and 2"), (0, "give an integer"), ("2", "'2'"), (True, "True")]
)
def test_an_algorithm_that_is_not_known_is_refused_naming_the_table(value: object, says: str) -> None:
    with pytest.raises(InvalidInputError, match=f"table 'user': .*{says}"):
        TableDef.from_dict(definition().to_dict() | {"init_algorithm": value})


def test_num_ids_is_identity_and_survives_the_registry() -> None:
    dense = definition(num_ids=np.int32(1000))
    assert type(dense.num_ids) is int
    assert decode_registry(encode_registry(1, [dense, definition(name="b")]))[1] == {"user": dense, "b": definition(name="b")}
    assert dense.pages == page_layout(dense.record.size_bytes)
    assert definition().pages is None
    assert len({definition(num_ids=n).schema for n in (None, 1, 2, 1000, 1001)}) > 3  # 8 bits each
    for first, second in ((dense, definition()), (definition(), dense), (dense, definition(num_ids=999))):
        with pytest.raises(TableMismatchError, match="num_ids: exists with"):
            first.require_same(second)
    dense.require_same(definition(num_ids=1000))


def test_parts_of_rows_are_identity_and_survive_the_registry_and_files() -> None:
    biased = definition(initializer=init.columns((1, init.zeros()), (3, init.normal(std=0.5))))
    assert (biased.schema, replace(biased, init_algorithm=1).schema) == (212, 94)
    assert decode_registry(encode_registry(1, [biased]))[1] == {"user": biased}
    assert TableDef.from_dict(json.loads(json.dumps(biased.to_dict()))) == biased
    biased.require_same(TableDef.from_dict(biased.to_dict()))
    other = definition(initializer=init.columns((2, init.zeros()), (2, init.normal(std=0.5))))
    with pytest.raises(TableMismatchError, match=r"initializer: exists with .*'width': 1.* asked for .*'width': 2"):
        biased.require_same(other)


def test_parts_that_are_not_dim_columns_together_are_refused_naming_the_table() -> None:
    with pytest.raises(InvalidInputError, match=r"table 'user': initializer\.parts: .* give 5 columns together, dim is 4; make them equal"):
        definition(initializer=init.columns((1, init.zeros()), (4, init.normal())))


@pytest.mark.parametrize("value", [0, -1, True, 3.0, "9", (1 << 63) + 1])
def test_num_ids_of_signed_ids_ends_at_2_to_the_63(value: object) -> None:
    with pytest.raises(InvalidInputError, match=r"table 'user': num_ids is .* give an integer in \[1, 2\*\*63\], or None"):
        definition(num_ids=value)
    assert definition(num_ids=1 << 63).num_ids == 1 << 63
    assert definition(num_ids=(1 << 64) - 1, id_dtype="uint64").schema < 256
    with pytest.raises(InvalidInputError, match=r"\[1, 2\*\*64 - 1\]"):
        definition(num_ids=1 << 64, id_dtype="uint64")


def test_rows_lie_in_pages_only_with_num_ids_and_where_storage_has_them() -> None:
    ids = np.array([3, 1], np.uint64)
    kinds = {(n, pages): type(definition(num_ids=n).keys(ids, pages=pages)) for n in (None, 9) for pages in (True, False)}
    assert kinds == {(None, True): BucketKeys, (None, False): RowKeys, (9, False): RowKeys, (9, True): PagedKeys}
    opened = definition(num_ids=9).keys(ids, pages=True, new=np.array([False, True]))
    assert isinstance(opened, PagedKeys)
    assert opened.opens is not None
    assert opened.opens.tolist() == [False, True]


def test_a_page_that_was_found_stands_for_all_of_its_rows() -> None:
    dense = definition(num_ids=1000)
    assert dense.pages is not None
    n = dense.pages.rows_per_page
    found = RowKeys(dense.tag, np.array([1, 1000 // n, 1000 // n + 1], np.uint64))
    rows = dense.rows_under(found, pages=True)
    assert isinstance(rows, PagedKeys)
    assert rows.ids.tolist() == [*range(n, 2 * n), *range(1000 // n * n, 1000)]
    assert dense.rows_under(found, pages=False).ids is found.ids
    assert isinstance(definition().rows_under(found, pages=True), BucketKeys)
    last = definition(num_ids=(1 << 64) - 1, id_dtype="uint64")
    ends = last.rows_under(RowKeys(last.tag, np.array([(2**64 - 2) // n], np.uint64)), pages=True).ids.tolist()
    assert ends == list(range((2**64 - 2) // n * n, 2**64 - 1))


def test_a_table_of_a_later_life_is_the_same_by_identity_and_another_by_everything_that_is_written() -> None:
    first, second = definition(), definition(life=1)
    first.require_same(second)
    assert (first.key, second.key) == (first.name, f"{first.name}\n1")
    assert first.schema != second.schema
    assert TableDef.from_dict(second.to_dict()) == second
    assert "life" not in first.to_dict()


def test_a_registry_with_dropped_tables_is_read_back_and_one_without_has_the_old_form() -> None:
    dropped = [Dropped(definition(), True), Dropped(definition(life=1), False)]
    read = decode_registry(encode_registry(5, [definition(name="b")], dropped))
    assert (read.serial, list(read.tables)) == (5, ["b"])
    assert list(read.dropped.values()) == dropped
    assert list(read.dropped) == [one.definition.key for one in dropped]


@pytest.mark.parametrize("rows_at_once", [1, 1 << 16])
def test_a_page_is_emptied_where_none_of_its_rows_exists_but_those_that_are_erased(
    rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvemb.schema.table_def._AT_ONCE", rows_at_once)
    dense = TableDef("t", 16, optim.sgd(), init.zeros(), num_ids=3 * 53 + 2)  # 53 rows a page; the last has two
    there = np.array([0, 1, 60, 106, 160], np.uint64)

    def exist(ids: np.ndarray) -> np.ndarray:
        assert (ids < 3 * 53 + 2).all()
        return np.isin(ids, there)

    for erased, pages in (([0], []), ([1, 0], [0]), ([60, 0], [1]), ([160, 106, 60], [1, 2, 3]), ([52], []), ([61], []), ([], [])):
        assert dense.emptied(np.array(erased, np.uint64), exist).tolist() == pages
    assert TableDef("t", 16, optim.sgd(), init.zeros()).emptied(there, exist).tolist() == []
