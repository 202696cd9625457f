"""Which storage kinds there are: ours, and those that other distributions bring."""

import re
from importlib import import_module
from pathlib import Path

import pytest
from memory_store import MemoryStore

from kvemb.config import StorageConfig
from kvemb.errors import ConfigError
from kvemb.stores.storage_kinds import DEFAULT_KIND, KINDS, open_store
from kvemb.stores.store import Store

ROOT = Path(__file__).parents[2]
IN_MEMORY = StorageConfig("memory", ("registry:1",))


def test_a_kind_that_nobody_brings_is_refused_with_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: ())
    with pytest.raises(ConfigError, match=r"storage\.kind: got 'memory', expected one of memcached, redis, redis-cluster, valkey"):
        open_store(IN_MEMORY, role="trainer")


def test_a_kind_of_another_distribution_is_found_by_its_entry_point(memory_kind: None) -> None:
    with open_store(IN_MEMORY, role="trainer") as store:
        assert isinstance(store, MemoryStore)
    with pytest.raises(ConfigError, match="expected one of memcached, memory, redis, redis-cluster, valkey"):
        open_store(StorageConfig("tape", ("registry:1",)), role="trainer")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_the_list_has_a_store(kind: str) -> None:
    module, _, name = KINDS[kind].store.partition(":")
    assert issubclass(getattr(import_module(module), name), Store)
    open_store(StorageConfig(kind, ("127.0.0.1:1",)), role="trainer").close()  # nothing connects before `open`


@pytest.mark.parametrize(
    ("path", "pattern", "unsaid"),
    [
        ("README.md", r"^  kind: redis +# (.+)$", set()),
        ("README.md", r"`kvemb demo --store (.+)$", {DEFAULT_KIND}),
        ("docs/compose.md", r"^\| `([a-z-]+)` \| .* \| `deploy/kvemb", {"memcached"}),
        ("kvemb/config.py", r"^    kind: str  # (.+), or the name of a registered store", set()),
    ],
)
def test_what_is_written_about_kinds_names_those_of_the_list(path: str, pattern: str, unsaid: set[str]) -> None:
    lines = re.findall(pattern, (ROOT / path).read_text(), re.MULTILINE)
    words = {word for line in lines for word in re.findall(r"[a-z]+(?:-[a-z]+)*", line)}
    assert (words & set(KINDS)) | unsaid == set(KINDS)
