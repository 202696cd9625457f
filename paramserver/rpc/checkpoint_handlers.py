"""The shard's end of save and load: messages in, messages out. The work is in `paramserver.checkpoint`."""

from collections.abc import Callable

from kvemb.errors import CheckpointError, ParameterServerError
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import Empty, LoadRequest, SaveReply, SaveRequest, SaveStatusRequest
from kvemb.schema.move_plan import SHARDS
from kvemb.stores.store_nodes import StoreNodes

from ..checkpoint.loader import check
from ..checkpoint.save_job import SaveOrder
from ..checkpoint.saver import Saver
from ..model.table_registry import Registry


class CheckpointHandlers:
    """Answers one shard's saves and loads. Thread-safe.

    Args:
        saver: of the shard.
        registry: of the shard.
        nodes: of the store; they say which map is in force.
        on_load: called once when the shard is to start again, to load; None where no caller would start it.
    """

    def __init__(self, saver: Saver, registry: Registry, nodes: StoreNodes, on_load: Callable[[], None] | None) -> None:
        self._saver, self._registry, self._nodes, self._on_load = saver, registry, nodes, on_load

    def save(self, request: SaveRequest, deadline: Deadline) -> SaveReply:
        """Cut the shard and begin to save it; answered once it is cut."""
        order = SaveOrder(request.save_id, request.url, request.base_version, request.weights_only)
        self._saver.begin(order, deadline.within(request.timeout_s))
        return SaveReply(*self._saver.progress(request.save_id))

    def status(self, request: SaveStatusRequest, deadline: Deadline) -> SaveReply:
        """Say how far a save is; hear that all of it is whole."""
        if request.whole:
            self._saver.figures.end(request.save_id, done=True)
        return SaveReply(*self._saver.progress(request.save_id))

    def load(self, request: LoadRequest, deadline: Deadline) -> Empty:
        """Check whether this shard could load a checkpoint, or begin; it stops serving then and starts again."""
        if self._on_load is None:
            raise ParameterServerError("this shard is not run by `kvemb shard`: stop and start it to load")
        if self._nodes.cluster_map.plan is not None:
            self._nodes.refresh_map(deadline)  # a move that has just ended is not said to go on
        plan = self._nodes.cluster_map.plan
        if plan is not None and plan.kind == SHARDS:
            raise CheckpointError(
                f"slots are moving between shards (phase {plan.phase}), and nothing was changed. `kvemb moves` shows how far that is; load "
                "when it is done."
            )
        if request.begin:
            self._on_load()
        else:
            check(request.url, request.save_id, self._registry)
        return Empty()
