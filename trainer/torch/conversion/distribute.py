"""distribute: a torch model's large embeddings become tables, in place, in one line; its training loop stays as it is.

Strategy: everything is checked before anything changes. Then tables are made and filled. The model and the optimizer are changed last, by
assignments that are undone if one fails.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from kvemb.errors import InvalidInputError
from kvemb.init import Initializer
from kvemb.optim import OptimizerSpec

from ...bridge.distributed import Distributed
from ...bridge.filled_tables import Carry, First, SiteTable, TableOptions, check_connection, exists, fill, make_table, open_table
from ...bridge.pushed_steps import MAX_UNAPPLIED, check_max_unapplied
from ..lookup.table_module import modules_by_table
from ..lookup.table_weight import become, let_go, turn_back
from ..modules.embedding import Embedding, EmbeddingBag, ScaledEmbedding
from ..optimizer.joined_step import Follows, JoinedStep
from ..optimizer.optimizer_map import MappedGroup, watch
from ..optimizer.sparse_optimizer import SparseOptimizer
from .distribute_plan import DistributePlan, Names, Site, TorchEmbedding, make_plan
from .distribute_report import lines
from .first_rows import check_range, first_rows
from .recognized_embeddings import is_scaled

if TYPE_CHECKING:
    from kvemb.api import Cluster


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
    min_rows: int = 10_000,
    optimizer: torch.optim.Optimizer | OptimizerSpec | None = None,
    carry_weights: Carry = None,
    names: Names | None = None,
    prefix: str = "",
    leave: Collection[str] = (),
    initializer: Initializer | None = None,
    dtype: str = "float32",
    seed: int = 0,
    reduce: str = "sum",
    max_unapplied: int = MAX_UNAPPLIED,
    quiet: bool = False,
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
        min_rows: embeddings of fewer rows stay, and so do frozen ones.
        optimizer: a torch optimizer made of the model's parameters. It keeps the others, and its step() pushes, too. Each table
            gets its rule and follows its group's run-time values (docs/conversion.md lists the mapped options). Or a `kvemb.optim` rule for
            all tables, to train with SparseOptimizer(model). None: open tables that exist, as for serving.
        carry_weights: True: assign the weights, however many. False: read their initializer off them. "overwrite": assign them also where
            the table exists; for one trainer alone.
        names: of the tables, by module path, or a function from path to name; the path unless given.
        prefix: stands before the name of each table, as "ranker/": a model that is not to share rows with another one needs its own.
        leave: paths of embeddings that stay.
        initializer: draws the rows, in place of the weights.
        dtype, seed, reduce: of the tables; see `kvemb.schema.table_def.TableDef`. With averaged dense gradients (DistributedDataParallel):
            reduce="mean".
        max_unapplied: of its pushes in an async job, see SparseOptimizer; goes with a torch optimizer.
        quiet: do not write the report to stderr.

    Raises:
        InvalidInputError: an embedding or an optimizer option that has no counterpart, named with its table, or arguments that do not
            go together. Nothing was changed.
        TableMismatchError, UnknownTableError, DeadlineExceededError, …: a table exists with another identity, or is missing, or is not
            filled. Model and optimizer are as they were; tables may have been made.

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
    check_connection(cluster)
    _check_arguments(optimizer, carry_weights, initializer, (dtype, seed, reduce))
    _check_bound(optimizer, max_unapplied)
    plan = make_plan(model, min_rows, names, leave, prefix)
    _check_carry(plan, carry_weights)
    torchs = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    follows = {} if torchs is None else {site.table: _follow(site, torchs) for site in plan.sites}
    rule_of = {name: follow.mapped.spec for name, follow in follows.items()}
    if isinstance(optimizer, OptimizerSpec):
        rule_of = {site.table: optimizer for site in plan.sites}
    trained = [site for site in plan.sites if torchs is not None and _has_state(torchs, site)]
    if optimizer is None:
        tables = [open_table(cluster, site) for site in plan.sites]
    else:
        first = first_rows(plan.sites, carry_weights, initializer, lambda site: exists(cluster, site))
        for site in plan.sites:
            if first[site.table].carried:
                check_range(site, dtype)
        tables = _made_and_filled(cluster, plan, rule_of, TableOptions(dtype, seed, reduce), first, carry_weights)
    sparse = _change(model, tables, torchs, follows, max_unapplied)
    for site in plan.sites:
        let_go(site.weight)
    report = lines(plan, tables, carry_weights, follows, trained)
    done = DistributedTorch(tables=tuple(one.table for one in tables), lines=tuple(report), optimizer=sparse)
    done.report(quiet=quiet)
    return done


def _check_arguments(optimizer: object, carry: object, initializer: Initializer | None, rest: tuple[str, int, str]) -> None:
    if carry not in (None, True, False, "overwrite"):
        raise InvalidInputError(f'carry_weights is {carry!r}; give True, False, "overwrite" or nothing')
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer | OptimizerSpec):
        raise InvalidInputError(f"optimizer is {optimizer!r}; give a torch.optim.Optimizer, or one of kvemb.optim's functions called")
    if optimizer is None and (carry is not None or initializer is not None or rest != ("float32", 0, "sum")):
        raise InvalidInputError(
            "carry_weights, initializer, dtype, seed and reduce need an optimizer: without one, tables that exist are opened as they are"
        )


def _check_bound(optimizer: object, max_unapplied: int) -> None:
    check_max_unapplied(max_unapplied)
    if max_unapplied != MAX_UNAPPLIED and not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidInputError("max_unapplied goes with a torch optimizer, whose step() pushes; otherwise give it to SparseOptimizer")


def _check_carry(plan: DistributePlan, carry: Carry) -> None:
    for site in plan.sites if carry else ():
        if site.weight.device.type == "meta":
            raise InvalidInputError(f"{site}: its weight is on the meta device and holds nothing to carry; give initializer= instead")


def _made_and_filled(
    cluster: "Cluster",
    plan: DistributePlan,
    rule_of: Mapping[str, OptimizerSpec],
    options: TableOptions,
    first: Mapping[str, First],
    carry: Carry,
) -> list[SiteTable[Site]]:
    tables: list[SiteTable[Site]] = []
    try:
        for site in plan.sites:
            tables.append(make_table(cluster, site, rule_of[site.table], options, first[site.table], carry))
        fill(tables, carry)
    except BaseException as error:
        begun = [one.site.table for one in tables if one.first.carried and (one.made or carry == "overwrite")]
        if begun:
            error.add_note(
                f"The table(s) {', '.join(begun)} exist now, perhaps without all of their first rows; call distribute again with "
                'carry_weights="overwrite", in one trainer'
            )
        raise
    return tables


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


def _change(
    model: nn.Module,
    tables: Sequence[SiteTable[Site]],
    optimizer: torch.optim.Optimizer | None,
    follows: Mapping[str, Follows],
    max_unapplied: int,
) -> SparseOptimizer | None:
    """Put the new modules and the push in; undo it all if that fails."""
    undo: list[Callable[[], object]] = []
    try:
        _replace(model, tables, undo)
        if optimizer is None:
            return None
        _take_out(optimizer, [one.site.weight for one in tables], undo)
        sparse = SparseOptimizer(model, max_unapplied=max_unapplied)
        modules_of = modules_by_table(model)
        pending = {name: modules[0].pending for name, modules in modules_of.items()}
        JoinedStep(optimizer, sparse, follows, pending)
        watch(optimizer, list(pending.values()), [module.stand_in for modules in modules_of.values() for module in modules])
        return sparse
    except BaseException:
        for action in reversed(undo):
            action()
        raise


def _replace(model: nn.Module, tables: Sequence[SiteTable[Site]], undo: list[Callable[[], object]]) -> None:
    new = {id(module): _module(module, one) for one in tables for _, module in one.site.modules}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if id(child) in new:
                parent._modules[name] = new[id(child)]
                undo.append(partial(parent._modules.__setitem__, name, child))
    for one in tables:
        for _, module in one.site.modules:
            module.__dict__["forward"] = new[id(module)].__call__
            undo.append(partial(module.__dict__.pop, "forward"))
        _read_from_table(one.site, new[id(one.site.modules[0][1])], undo)


def _read_from_table(site: Site, module: Embedding | EmbeddingBag, undo: list[Callable[[], object]]) -> None:
    """Let every holder of the weight read the table's rows: it is no module's parameter any more."""
    kind, parameter = type(site.weight), cast(nn.Parameter, site.weight)
    become(site.weight, module)
    undo.append(partial(turn_back, site.weight, kind))
    for _, tied, name in site.tied:
        tied.__dict__[name] = site.weight  # found before parameters; the parameter's place stays, for `materialize`
        tied._parameters[name] = None
        undo.append(partial(tied._parameters.__setitem__, name, parameter))
        undo.append(partial(tied.__dict__.pop, name))


def _module(old: TorchEmbedding, one: SiteTable[Site]) -> Embedding | EmbeddingBag:
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
