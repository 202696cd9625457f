"""Variables of TensorFlow's checkpoints as foreign rows, there and back, bit for bit."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvemb
from kvemb.api import Cluster
from kvemb.errors import ForeignRowsError
from kvemb.foreign.foreign_rows import ArrayNames
from kvemb.foreign.formats import open_rows
from kvemb.local_cluster import LocalCluster
from kvemb.schema.table_def import TableDef

tf = pytest.importorskip("tensorflow")
N = 100
ROWS = np.random.default_rng(5).standard_normal((N, 3), dtype=np.float32)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with LocalCluster() as local, kvemb.connect(local.url) as opened:
        yield opened


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_a_variable_is_read_by_its_name_with_text_ids_and_state(tmp_path: Path, dtype: str) -> None:
    given, words = tf.cast(tf.constant(ROWS), dtype), [f"wörd{i}" for i in range(N)]
    held = tf.train.Checkpoint(emb=tf.Variable(given), words=tf.Variable(words), accumulator=tf.Variable(given * 2))
    prefix = held.write(str(tmp_path / "m.ckpt"))
    attribute = "/.ATTRIBUTES/VARIABLE_VALUE"
    names = ArrayNames(f"words{attribute}", f"emb{attribute}", f"accumulator{attribute}")
    user = TableDef("user", 3, kvemb.optim.adagrad(), kvemb.init.zeros())
    for url, file_format in ((f"{prefix}.index", ""), (prefix, "tensorflow")):
        (block,) = open_rows(user, url, names, file_format).blocks()
        assert block.weights.tobytes() == tf.cast(given, "float32").numpy().tobytes()
        assert block.state is not None
        assert block.state.tobytes() == tf.cast(given * 2, "float32").numpy().tobytes()
        assert block.ids.view(np.int64).tolist() == kvemb.hash_ids(words).tolist()


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    tf.train.Checkpoint(emb=tf.Variable(ROWS)).write(str(tmp_path / "m.ckpt"))
    user = TableDef("user", 3, kvemb.optim.sgd(), kvemb.init.zeros())
    (data,) = tmp_path.glob("*.data*")
    changed = bytearray(data.read_bytes())
    changed[5] ^= 1
    data.write_bytes(changed)
    with pytest.raises(ForeignRowsError, match="cannot be read"):
        list(open_rows(user, str(tmp_path / "m.ckpt.index"), ArrayNames()).blocks())
    (tmp_path / "m.ckpt.index").write_bytes(b"")
    with pytest.raises(ForeignRowsError, match=r"m\.ckpt\.index: cannot be read"):
        open_rows(user, str(tmp_path / "m.ckpt.index"), ArrayNames())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_table_is_exported_to_a_checkpoint_and_comes_back_bit_for_bit(cluster: Cluster, tmp_path: Path, dtype: str) -> None:
    ids = np.arange(N) * 7 - 52
    for name in ("there", "back"):
        cluster.create_table(f"{name}-{dtype}", dim=3, dtype=dtype, optimizer=kvemb.optim.sgd(), initializer=kvemb.init.zeros())
    cluster.table(f"there-{dtype}").assign(ids, ROWS)
    cluster.files.export_rows(f"there-{dtype}", tmp_path / "t", format="tensorflow")
    assert cluster.files.import_rows(f"back-{dtype}", tmp_path / "t.index").n_rows == N
    assert cluster.table(f"back-{dtype}").pull(ids).tobytes() == cluster.table(f"there-{dtype}").pull(ids).tobytes()
