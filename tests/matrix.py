"""Which cases a slow test has in `make test`, and which `make test-all` adds."""

from collections.abc import Sequence

import pytest


def one_of(first: object, *others: object) -> Sequence[object]:
    """Return parameters of a test: the first for every run, the others with the marker `matrix`.

    For tests of a whole cluster that say the same on each storage kind. What differs between kinds, the store contract tests on all.
    """
    return [first, *(pytest.param(other, marks=pytest.mark.matrix) for other in others)]
