"""ChangeCount: what has changed rows is counted when it begins and when it is over, without servers."""

import pytest

from kvemb.change_count import ChangeCount


class Ack:
    settled = False


def test_a_push_is_over_when_it_is_applied_whatever_the_order() -> None:
    changes, first, second = ChangeCount(), Ack(), Ack()
    for ack in (first, second):
        changes.begin_push()
        changes.pushed(ack)
    assert changes.now() == 2
    second.settled = True
    assert changes.now() == 3
    first.settled = True
    assert changes.now() == changes.now() == 4


def test_what_fails_may_have_changed_rows_too() -> None:
    changes = ChangeCount()
    with pytest.raises(OSError, match="no shard"), changes.change():
        raise OSError("no shard")
    changes.begin_push()
    changes.failed()
    assert changes.now() == 4
