"""Bridges of frameworks that are not installed here, and what hands them on, are left out of the search for doctests.

The examples of `kvemb.Table` share one cluster, each with a table of its own.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count

import numpy as np
import pytest

import kvemb

_ABSENT = [name for name in ("jax", "keras", "tensorflow", "torch") if find_spec(name) is None]
collect_ignore_glob = [pattern for name in _ABSENT for pattern in (f"trainer/{name}/*", f"kvemb/{name}.py")]
_names = count()


@pytest.fixture(scope="module")
def example_cluster() -> Iterator[kvemb.Cluster]:
    with kvemb.local() as url, kvemb.connect(url) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _table_of_examples(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.node.name.startswith("kvemb.api.table.Table."):
        yield
        return
    cluster, names = request.getfixturevalue("example_cluster"), request.getfixturevalue("doctest_namespace")
    users = cluster.create_table(f"user{next(_names)}", dim=2, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
    given = {"users": users, "kvemb": kvemb, "np": np}
    names.update(given)
    yield
    for name in given:
        del names[name]
