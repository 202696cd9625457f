"""The write counter: a write is counted when it begins and when it is over, without servers."""

import pytest

from kvemb.connection import WriteCounter
from kvemb.net.deadline import Deadline


class Ack:
    """A push that the test releases, and that is in storage when a caller waits for it."""

    released = settled = False

    def wait_settled(self, timeout_s: float) -> None:
        assert 0 < timeout_s <= 60
        self.settled = True


def test_a_push_is_over_when_it_is_released_whatever_the_order() -> None:
    changes, first, second = WriteCounter(), Ack(), Ack()
    for ack in (first, second):
        changes.count()
        changes.pushed(ack)
    assert changes.now() == 2
    second.released = True
    assert changes.now() == 3
    first.released = True
    assert changes.now() == changes.now() == 4


def test_what_fails_may_have_changed_rows_too() -> None:
    changes = WriteCounter()
    with pytest.raises(OSError, match="no shard"), changes.change():
        raise OSError("no shard")
    changes.count()
    changes.count()
    assert changes.now() == 4


def test_what_was_released_before_storage_has_it_is_waited_for() -> None:
    changes, pushed, released, stored = WriteCounter(), Ack(), Ack(), Ack()
    stored.released = stored.settled = True
    for ack in (pushed, stored):
        changes.count()
        changes.pushed(ack)
    assert changes.all_stored()
    changes.count()
    changes.pushed(released)
    assert changes.all_stored(), "nothing was released to this connection that storage lacks"
    released.released = True
    assert not changes.all_stored()
    changes.wait_stored(Deadline.after(60))
    assert released.settled
    assert not pushed.settled, "a push that is not released is not waited for: its rows need not be seen"
    assert changes.all_stored()
    assert changes.now() == 5
