"""distribute: a torch model's large embeddings become tables, in place, in one line; its training loop stays as it is.

Strategy: the model and the optimizer are changed by assignments that are undone if one fails.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Unpack, cast

import torch
from torch import nn

from kvemb.errors import InvalidInputError
from kvemb.init import Initializer
from kvemb.optim import OptimizerSpec

from ...bridge.convert_model import Conversion, Distributed, DistributeOptions, convert_model
from ...bridge.filled_tables import CARRIED, Carry, First, Site, SiteTable, TableOptions, WeightPlace
from ...bridge.pushed_steps import MAX_UNAPPLIED, check_max_unapplied
from ..lookup.parameter_walks import n_ranks
from ..lookup.table_module import modules_by_table
from ..lookup.table_weight import WEIGHT_BYTES, become, is_readable, let_go, turn_back
from ..modules.embedding import Embedding, EmbeddingBag, ScaledEmbedding
from ..optimizer.joined_step import Follows, JoinedStep
from ..optimizer.optimizer_map import MappedGroup, watch
from ..optimizer.sparse_optimizer import SparseOptimizer
from .distribute_plan import TorchEmbedding, held_at, is_scaled, places_of, problems_of, tied_to
from .outside_references import OutsideReference, outside_references

if TYPE_CHECKING:
    from kvemb.api import Cluster

CARRY_ROWS, CARRY_BYTES = 10_000_000, 1 << 30
"""How much of a model is assigned without a request: about a minute's work for two shards on a machine of 2 cores."""
_SHOWN = 8


@dataclass(frozen=True, eq=False, kw_only=True)
class DistributedTorch(Distributed):
    """The result of `distribute`.

    Args:
        optimizer: pushes at the optimizer's step: `last_ack`, `staleness`; None unless a torch optimizer was given.
    """

    optimizer: SparseOptimizer | None


def distribute(
    model: nn.Module,
    cluster: "Cluster",
    *,
    optimizer: torch.optim.Optimizer | OptimizerSpec | None = None,
    carry_weights: Carry = None,
    max_unapplied: int = MAX_UNAPPLIED,
    **options: Unpack[DistributeOptions],
) -> DistributedTorch:
    """Replace a model's large nn.Embedding and nn.EmbeddingBag by ones whose rows the cluster keeps, in place.

    Every trainer of a job calls it, with the same arguments, before the model is wrapped (DistributedDataParallel, torch.compile);
    so does one that resumes. Tables that exist are opened, if they have the same identity. An embedding too large for this machine is
    made on the meta device: `with torch.device("meta"): nn.Embedding(10**9, 16)`.

    A table begins with the module's own weights. The trainer that makes it assigns them, while others wait until they are there.
    Weights beyond 10 million rows or 1 GiB in all are not assigned unasked, nor those on the meta device: it asks for `initializer` or
    `carry_weights`. A table that exists keeps its rows.

    Args:
        model: whose embeddings are replaced; modules that share a weight share the table.
        cluster: of `kvemb.connect`.
        optimizer: a torch optimizer made of the model's parameters. It keeps the others, and its step() pushes, too. Each table
            gets its rule and follows its group's run-time values (docs/conversion.md lists the mapped options). Or a `kvemb.optim` rule for
            all tables, to train with SparseOptimizer(model). None: open tables that exist, as for serving.
        carry_weights: True: assign the weights, however many. False: none, so give `initializer`. "overwrite": assign them also where
            the table exists; for one trainer alone.
        max_unapplied: of its pushes in an async job, see SparseOptimizer; goes with a torch optimizer.
        options: `DistributeOptions`: min_rows, names, prefix, leave, initializer, dtype, seed, reduce, quiet. With averaged dense gradients
            (DistributedDataParallel): reduce="mean".

    Raises:
        InvalidInputError: an embedding or an optimizer option that has no counterpart, named with its table, or arguments that do not
            go together. Nothing was changed.
        TableMismatchError, UnknownTableError, DeadlineExceededError, …: of a table; the model is as it was, tables may have been made.

    Example:
        >>> import kvemb, torch
        >>> from kvemb.torch import distribute
        >>> model = torch.nn.Sequential(torch.nn.EmbeddingBag(20_000, 8), torch.nn.Linear(8, 1))
        >>> optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        >>> with kvemb.local(shards=1) as url, kvemb.connect(url) as cluster:
        ...     done = distribute(model, cluster, optimizer=optimizer, names={"0": "word"}, quiet=True)
        ...     loss = model(torch.tensor([[7, 8, 7]])).sum()
        ...     loss.backward()
        ...     optimizer.step()
        ...     cluster.flush()
        ...     len(cluster.table("word"))
        20000
    """
    _check_arguments(optimizer, carry_weights, options)
    check_max_unapplied(max_unapplied)
    if max_unapplied != MAX_UNAPPLIED and not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidInputError("max_unapplied goes with a torch optimizer, whose step() pushes; otherwise give it to SparseOptimizer")
    return convert_model(TorchModel(model, optimizer, carry_weights, max_unapplied), cluster, carry=carry_weights, **options)


def _check_arguments(optimizer: object, carry: object, options: DistributeOptions) -> None:
    if carry not in (None, True, False, "overwrite"):
        raise InvalidInputError(f'carry_weights is {carry!r}; give True, False, "overwrite" or nothing')
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer | OptimizerSpec):
        raise InvalidInputError(f"optimizer is {optimizer!r}; give a torch.optim.Optimizer, or one of kvemb.optim's functions called")
    usual: DistributeOptions = {"initializer": None, "dtype": "float32", "seed": 0, "reduce": "sum"}
    if optimizer is None and (carry is not None or usual | options != options | usual):
        raise InvalidInputError(
            "carry_weights, initializer, dtype, seed and reduce need an optimizer: without one, tables that exist are opened as they are"
        )


class TorchModel(Conversion[DistributedTorch]):
    """A torch model and its optimizer."""

    kind = "module"
    sought = "nn.Embedding or nn.EmbeddingBag"

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | OptimizerSpec | None = None,
        carry: Carry = None,
        max_unapplied: int = MAX_UNAPPLIED,
    ) -> None:
        self._model, self._rule, self._carry, self._max_unapplied = model, optimizer, carry, max_unapplied
        self._optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        self._beside: Sequence[OutsideReference] = ()
        self._follows: dict[str, Follows] = {}
        self._trained: list[str] = []
        self._holders: list[tuple[Site, list[str]]] = []  # paths that lead to a site beside its modules

    def places(self) -> list[WeightPlace]:
        """Find the embeddings."""
        found = places_of(self._model)
        self._beside = outside_references(self._model)
        return found

    def problems(self, holders: Sequence[WeightPlace]) -> Iterator[str]:
        """As `problems_of`."""
        return problems_of(self._model, self._beside, holders)

    def tied(self, site: Site) -> list[tuple[str, nn.Module, str]]:
        """Return (path, module, name) of parameters of other modules that are the site's weight."""
        return list(tied_to(self._model, site))

    def held(self, site: Site) -> list[str]:
        """Return the paths of attributes that lead to a site."""
        return list(held_at(self._beside, site))

    def rules(self, sites: Sequence[Site], options: TableOptions) -> Mapping[str, OptimizerSpec] | None:
        """Find the group of the optimizer that holds each weight."""
        for site in sites if self._carry else ():
            if _is_meta(site):
                raise InvalidInputError(f"{site}: its weight is on the meta device and holds nothing to carry; give initializer= instead")
        if self._optimizer is None:
            return {site.table: self._rule for site in sites} if isinstance(self._rule, OptimizerSpec) else None
        self._follows = {site.table: _follow(site, self._optimizer) for site in sites}
        self._trained = [site.table for site in sites if _has_state(self._optimizer, site)]
        return {name: follow.mapped.spec for name, follow in self._follows.items()}

    def first_rows(self, sites: Sequence[Site], given: Initializer | None, exists: Callable[[Site], bool]) -> dict[str, First]:
        """Assign the module's weights, if all of a model's can be assigned in a minute or so; else ask. A table that exists needs none."""
        carry = self._carry
        if given is not None and not carry:
            return {site.table: First(False, given, True) for site in sites}
        carried = _assignable(sites) if carry is None else {site.table for site in sites if carry}
        first, unknown = {}, []
        for site in sites:
            if site.table in carried:
                first[site.table] = First(True, given or CARRIED, given is not None)
            elif exists(site):
                first[site.table] = First(False, None)
            else:
                unknown.append(f"{site}, {site.n_rows} x {site.dim}: {_why_unknown(site, carry)}")
        if unknown:
            hint = ", carry_weights=True to assign the module's weights however long it takes"
            raise InvalidInputError(
                "nothing was changed: the first rows are not known of "
                + "; ".join(unknown)
                + ". Give initializer=, as kvemb.init.normal(std=1.0), which is nn.Embedding's own, to draw them"
                + ("" if carry is False or all(map(_is_meta, sites)) else hint)
                + ", or keep these local with leave=[their paths]"
            )
        return first

    def convert(self, tables: Sequence[SiteTable], cluster: "Cluster", options: TableOptions) -> Callable[..., DistributedTorch]:
        """Put the new modules and the push in; undo it all if that fails."""
        self._holders = [(one.site, [*(path for path, *_ in self.tied(one.site)), *self.held(one.site)]) for one in tables]
        undo: list[Callable[[], object]] = []
        try:
            _replace(self._model, [(one, self.tied(one.site)) for one in tables], undo)
            sparse = None if self._optimizer is None else self._joined(self._optimizer, tables, undo)
        except BaseException:
            for action in reversed(undo):
                action()
            raise
        for one in tables:
            let_go(one.site.weight)
        return partial(DistributedTorch, tables=tuple(one.table for one in tables), optimizer=sparse)

    def _joined(self, optimizer: torch.optim.Optimizer, tables: Sequence[SiteTable], undo: list[Callable[[], object]]) -> SparseOptimizer:
        _take_out(optimizer, [one.site.weight for one in tables], undo)
        sparse = SparseOptimizer(self._model, max_unapplied=self._max_unapplied)
        modules_of = modules_by_table(self._model)
        pending = {name: modules[0].pending for name, modules in modules_of.items()}
        JoinedStep(optimizer, sparse, self._follows, pending)
        watch(optimizer, list(pending.values()), [module.stand_in for modules in modules_of.values() for module in modules])
        return sparse

    def notes(self, tables: Sequence[SiteTable]) -> Iterable[str]:
        """Name what holds a replaced weight besides, and the differences from now on."""
        for readable in (True, False):
            held = [path for site, paths in self._holders if is_readable(site.n_rows, site.dim) is readable for path in paths]
            if not held:
                continue
            shown = ", ".join(held[:_SHOWN]) + (f" and {len(held) - _SHOWN} more" if len(held) > _SHOWN else "")
            whole = "a read of a weight pulls all rows, and a step pushes all their gradients"
            if not readable:
                whole = f"a read of a weight raises an error, for these tables are beyond {WEIGHT_BYTES >> 20} MiB"
            yield f"note: the replaced module is also held at {shown}; calls there look the table up, and {whole}"
        if lazy := sorted(name for name, one in self._follows.items() if one.mapped.lazy):
            yield (
                "note: as with torch.optim.SparseAdam, rows move only in steps whose batches hold them; with dense gradients torch would "
                f"also move the others, by momentum or decay ({', '.join(lazy)})"
            )
        ranks = n_ranks()
        summed = [one.site.table for one in tables if one.table.definition.reduce == "sum" and one.table.cluster.mode == "sync"]
        if ranks > 1 and summed:
            yield (
                f"note: gradients of rows are summed over the trainers; if those of dense weights are averaged over these {ranks} ranks, "
                f'as DistributedDataParallel does, give reduce="mean" ({", ".join(summed)})'
            )
        if ranks > 1 and self._follows:
            yield "note: clip gradients with kvemb.torch.clip_grad_norm_(model, …) on every rank; torch's own leaves rows out in such a job"
        if self._trained:
            names = ", ".join(self._trained)
            yield f"note: the optimizer's state of these weights (moments, sums) is not carried, and begins again ({names})"


def _is_meta(site: Site) -> bool:
    return bool(site.weight.device.type == "meta")


def _assignable(sites: Iterable[Site]) -> set[str]:
    """The tables whose weights are assigned unasked: the smallest first, while all together are not too many."""
    n_rows, n_bytes, names = 0, 0, set()
    for site in sorted((site for site in sites if not _is_meta(site)), key=lambda site: (site.n_rows * site.dim, site.table)):
        n_rows, n_bytes = n_rows + site.n_rows, n_bytes + 4 * site.n_rows * site.dim
        if n_rows <= CARRY_ROWS and n_bytes <= CARRY_BYTES:
            names.add(site.table)
    return names


def _why_unknown(site: Site, carry: Carry) -> str:
    if _is_meta(site):
        return "its weight is on the meta device and holds nothing"
    if carry is False:
        return "carry_weights is False"
    return f"too large to be assigned unasked (beyond {CARRY_ROWS} rows or {CARRY_BYTES >> 20} MiB of the model)"


def _follow(site: Site, optimizer: torch.optim.Optimizer) -> Follows:
    """Find the group that holds the site's weight, and its meaning for a table."""
    for at, group in enumerate(optimizer.param_groups):
        if any(param is site.weight for param in group["params"]):
            return Follows(at, MappedGroup(optimizer, group, str(site)))
    raise InvalidInputError(
        f"{site}: its weight is no parameter of the optimizer, so it would not be trained; give the optimizer that holds it (one for all "
        "embeddings), freeze it, or leave it local with leave=[…]"
    )


def _has_state(optimizer: torch.optim.Optimizer, site: Site) -> bool:
    """Whether it has trained this weight: Adagrad has a state from the beginning, at step 0."""
    state = optimizer.state.get(site.weight, {})
    return any(value is not None for value in state.values()) and bool(state.get("step", 1))


_Tied = Sequence[tuple[str, nn.Module, str]]


def _replace(model: nn.Module, tables: Sequence[tuple[SiteTable, _Tied]], undo: list[Callable[[], object]]) -> None:
    new = {id(place.holder): _module(place.holder, one) for one, _ in tables for place in one.site.places}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if id(child) in new:
                parent._modules[name] = new[id(child)]
                undo.append(partial(parent._modules.__setitem__, name, child))
    for one, tied in tables:
        for place in one.site.places:
            place.holder.__dict__["forward"] = new[id(place.holder)].__call__
            undo.append(partial(place.holder.__dict__.pop, "forward"))
        _read_from_table(one.site.weight, tied, new[id(one.site.places[0].holder)], undo)


def _read_from_table(weight: nn.Parameter, tied: _Tied, module: Embedding | EmbeddingBag, undo: list[Callable[[], object]]) -> None:
    """Let every holder of the weight read the table's rows: it is no module's parameter any more."""
    undo.append(partial(turn_back, weight, type(weight)))
    become(weight, module)
    for _, other, name in tied:
        other.__dict__[name] = weight  # found before parameters; the parameter's place stays, for `materialize`
        other._parameters[name] = None
        undo.append(partial(other._parameters.__setitem__, name, weight))
        undo.append(partial(other.__dict__.pop, name))


def _module(old: TorchEmbedding, one: SiteTable) -> Embedding | EmbeddingBag:
    new: Embedding | EmbeddingBag
    if isinstance(old, nn.EmbeddingBag):
        new = EmbeddingBag(one.table, old.mode, old.include_last_offset, old.padding_idx)
    elif is_scaled(old):
        new = ScaledEmbedding(one.table, old.padding_idx, cast(float | torch.Tensor, old.embed_scale))
    else:
        new = Embedding(one.table, old.padding_idx)
    device = one.site.weight.device
    new.make_stand_in(torch.device("cpu") if device.type == "meta" else device)
    return new.train(old.training)


def _take_out(optimizer: torch.optim.Optimizer, weights: Sequence[torch.Tensor], undo: list[Callable[[], object]]) -> None:
    """Let the optimizer forget these parameters; the others keep their group, place and state."""
    gone = {id(weight) for weight in weights}
    for group in optimizer.param_groups:
        stays = [id(param) not in gone for param in group["params"]]
        for key in ("params", "param_names"):
            if key in group and not all(stays):
                values = group[key]
                undo.append(partial(values.__setitem__, slice(None), list(values)))
                values[:] = [value for value, kept in zip(values, stays, strict=True) if kept]
    for weight in weights:
        if weight in optimizer.state:
            undo.append(partial(optimizer.state.__setitem__, weight, optimizer.state.pop(weight)))
