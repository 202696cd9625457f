"""The demo's text: which files, which words, which ids, and the held-out part."""

from pathlib import Path

import numpy as np
import pytest

from kvemb.arrays.hashing import hash_ids
from kvemb.demo.corpus import HELD_OUT_EVERY, HELD_OUT_STRETCH, Corpus, build, load, source_files, split_words
from kvemb.errors import InvalidInputError


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "b.py": b"import os  # the path\n",
        "a.py": b"def f(x):\n    return 'x'\n",
        "test/deep.py": b"self.assertEqual(1, 2)\n",
        "a/z.py": b"z = 1\n",
        "site-packages/foreign.py": b"foreign = 1\n",
        "__pycache__/stale.py": b"stale = 1\n",
        "bad.py": b"broken = '\xff\xfe'\n",
        "notes.txt": b"notes\n",
        "empty.py": b"",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_source_files_are_python_only_sorted_and_without_installed_packages(tree: Path) -> None:
    found = [path.relative_to(tree).as_posix() for path in source_files(tree)]
    assert found == ["a/z.py", "a.py", "b.py", "bad.py", "empty.py", "test/deep.py"]


def test_words_keep_keywords_comments_and_strings_and_drop_numbers() -> None:
    words = split_words("if x1 == 0x1F: # said\n  s = b'größe _y' + 1e5")
    assert words == ["if", "x1", "said", "s", "b", "größe", "_y"]


def test_load_reads_the_tree_in_order_and_passes_over_files_that_do_not_decode(tree: Path) -> None:
    corpus = load(tree)
    expected = ["z", "def", "f", "x", "return", "x", "import", "os", "the", "path", "self", "assertEqual"]
    assert corpus.tokens.dtype == np.int64
    assert corpus.tokens.tolist() == hash_ids(expected).tolist()
    assert corpus.runs.tolist() == [1] * 1 + [2] * 5 + [3] * 4 + [4] * 2
    assert corpus.n_files == 5


def places(corpus: Corpus, words: list[str]) -> list[int]:
    return [corpus.words.index(word) for word in words]


def test_a_folder_without_sources_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no word in") as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_one_stretch_in_fifty_is_held_out_and_not_counted() -> None:
    n_words = HELD_OUT_STRETCH * HELD_OUT_EVERY * 2 + 100
    stretches = [i // HELD_OUT_STRETCH % HELD_OUT_EVERY for i in range(n_words)]
    words = ["secret" if stretch == HELD_OUT_EVERY - 1 else "train" for stretch in stretches]
    corpus = build([words])
    assert int(corpus.held_out.sum()) == 2 * HELD_OUT_STRETCH
    assert set(corpus.tokens[corpus.held_out].tolist()) == set(hash_ids(["secret"]).tolist())
    assert corpus.counts[places(corpus, ["secret", "train"])].tolist() == [0, n_words - 2 * HELD_OUT_STRETCH]
