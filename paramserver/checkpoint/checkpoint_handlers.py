"""The shard's end of save and load: messages in, messages out. What they do is in `saver` and `loader`."""

from collections.abc import Callable

from kvemb.errors import ParameterServerError
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import LoadRequest, SaveReply, SaveRequest

from ..model.table_registry import Registry
from .loader import check
from .save_job import SaveOrder
from .saver import Saver


class ShardArchive:
    """Answers one shard's saves and loads. Thread-safe.

    Args:
        saver: of the shard.
        registry: of the shard.
        on_load: called once when the shard is to start anew, to load; None where nobody would start it.
    """

    def __init__(self, saver: Saver, registry: Registry, on_load: Callable[[], None] | None) -> None:
        self._saver, self._registry, self._on_load = saver, registry, on_load

    def save(self, request: SaveRequest, deadline: Deadline) -> SaveReply:
        """Cut the shard and begin to save it."""
        self._saver.begin(SaveOrder(request.save_id, request.url, request.base_version, request.weights_only), deadline)
        return self.progress(request.save_id)

    def progress(self, save_id: str) -> SaveReply:
        """Say how far a save is."""
        return SaveReply(*self._saver.progress(save_id))

    def load(self, request: LoadRequest) -> None:
        """Check a load, or begin it: this shard is stopped and started anew then."""
        if self._on_load is None:
            raise ParameterServerError("this shard is not run by `kvemb shard`: stop and start it to load")
        if request.begin:
            self._on_load()
        else:
            check(request.url, request.save_id, self._registry)
