"""The state file in a shard's folder, and the process that may replace it."""

from collections.abc import Callable

from ..shard_process.data_dir import DataDir
from .state_file import ShardState, encode_state

STATE = "state"


class SavedState:
    """A shard's state as its folder holds it. Apply thread only, once there is one.

    Args:
        data: the shard's folder.
        now: what the folder holds, in this process's epoch.
        still_ours: raises FencedError once another process owns the folder; asked right before the file is replaced.
    """

    def __init__(self, data: DataDir, now: ShardState, still_ours: Callable[[], None] = lambda: None) -> None:
        self._data, self._still_ours = data, still_ours
        self.now = now

    def assume(self, state: ShardState) -> None:
        """Go on from a state that says the same as the file, in another form, which the next `replace` writes."""
        self.now = state

    def replace(self, state: ShardState) -> None:
        """Put another state in its place, durably.

        Raises:
            FencedError: another process owns the shard; nothing changed.
            OSError: the old state is in force, or after a failed sync either.
        """
        self._data.write(STATE, [encode_state(state)], self._still_ours)
        self.now = state
