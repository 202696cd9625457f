"""Which tests and cases `make test-all` has and `make test` has not: the marker `full`.

`make test` says once what users are promised: the contract of every store, the parity of every optimizer, every guarantee on one storage
kind. A test or a file that says the same at a further point, or says it in a whole program, has the marker itself.
"""

from collections.abc import Collection, Mapping, Sequence

import hypothesis
import pytest


def one_of(first: object, *others: object) -> Sequence[object]:
    """Return parameters of a test: the first for every run, the others with the marker `full`.

    For tests of a whole cluster that say the same on each storage kind. What differs between kinds, the store contract tests on all.
    """
    return [first, *(pytest.param(other, marks=pytest.mark.full) for other in others)]


def named(cases: Mapping[str, object], *, full: Collection[str]) -> Sequence[object]:
    """Return the cases as parameters with their names; those of these names have the marker `full`."""
    return [pytest.param(case, id=name, marks=[pytest.mark.full] if name in full else []) for name, case in cases.items()]


def examples(n: int) -> int:
    """Return how many examples Hypothesis shall try: n, and fewer in the profile `quick`. Where nothing says so, n is 100."""
    return n * hypothesis.settings.default.max_examples // 100  # type: ignore[union-attr]
