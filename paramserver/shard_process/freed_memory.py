"""Memory that was freed and that the C library keeps for later: batches use it again, and what took much once in a while gives it back."""

import ctypes
from contextlib import suppress


def give_back() -> None:
    """Have glibc give the pages of freed memory back to the system: at the end of a save, a load or a hand-over, never of a batch.

    A threshold for all arrays would have those of every batch mapped anew: that doubled a shard's time for a trained row.
    """
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
