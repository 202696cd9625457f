"""Every private name of a framework that a bridge uses, so that a release which has lost one is told by that name.

`USED` has them by the object that has them. Names outside of it are found in the sources, and those that nothing uses any more.
"""

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

TRAINER = Path(__file__).resolve().parents[2] / "trainer"
NEEDS = {"torch": "torch.nn", "keras": "keras", "tensorflow": "tensorflow", "jax": "optax"}


def torch_objects() -> dict[str, Any]:
    torch = import_module("torch")
    module, group = torch.nn.BatchNorm1d(2), import_module("torch.distributed").ProcessGroup
    return {
        "torch": torch,
        "nn.Module": module,
        "nn.Parameter": next(module.parameters()),
        "autograd.Variable": torch.autograd.Variable,
        "operator": torch.ops.aten.add.Tensor,
        "distributed.ProcessGroup": group,
        "distributed.Backend.Options": import_module("torch.distributed").ProcessGroupGloo._Options(),
        "amp.GradScaler": words_of("torch.amp.grad_scaler"),
        "sys": sys,
    }


def keras_objects() -> dict[str, Any]:
    keras = import_module("keras")
    backend = keras.backend.backend()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Embedding(3, 2), keras.layers.Flatten(), keras.layers.Dense(1)])
    optimizer = keras.optimizers.AdamW(gradient_accumulation_steps=2)
    optimizer.exclude_from_weight_decay(var_names=["none"])
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    trainer = type("Model", (keras.Model,), {})()
    return {
        "Sequential": model,
        "Functional": model._functional,
        "layers.Embedding": model.layers[0],
        "KerasTensor": model.outputs[0],
        "Optimizer": optimizer,
        "Variable": model.trainable_variables[0],
        "Model": trainer,
        "jax.Model": words_of("keras.src.backend.jax.trainer") if backend == "jax" else _Any(),
        "tensorflow.Model": trainer if backend == "tensorflow" else _Any(),
        "jax.trainer": import_module("keras.src.backend.jax.trainer") if backend == "jax" else _Any(),
        "EpochIterator": import_module("keras.src.trainers.epoch_iterator").EpochIterator,
        "torch": import_module("torch") if backend == "torch" else _Any(),
        "torch._C": import_module("torch")._C if backend == "torch" else _Any(),
    }


def tensorflow_objects() -> dict[str, Any]:
    tf = import_module("tensorflow")
    optimizer = tf.keras.optimizers.SGD()
    optimizer.build([tf.Variable(1.0)])
    return {"Module": tf.Module(), "ResourceVariable": tf.Variable([[1.0]]), "keras.optimizers.Optimizer": optimizer}


def jax_objects() -> dict[str, Any]:
    optax = import_module("optax")
    return {"optax.MultiSteps": optax.MultiSteps(optax.sgd(0.1), 2)}


def words_of(module: str) -> SimpleNamespace:
    """What a module's code says: it gives these names to objects as they come."""
    return SimpleNamespace(**dict.fromkeys(re.findall(r"\b_\w+", inspect.getsource(import_module(module)))))


class _Any(SimpleNamespace):
    """What this process has not: it has every name."""

    def __getattr__(self, name: str) -> Any:
        return self


OBJECTS: dict[str, Callable[[], dict[str, Any]]] = {
    "torch": torch_objects,
    "keras": keras_objects,
    "tensorflow": tensorflow_objects,
    "jax": jax_objects,
}
USED: dict[str, dict[str, str]] = {
    "torch": {
        "torch": "_C _check _dynamo _ops",
        "nn.Module": "_apply _buffers _load_from_state_dict _modules _non_persistent_buffers_set _parameters _save_to_state_dict",
        "nn.Parameter": "_base",
        "autograd.Variable": "_execution_engine",
        "operator": "_schema",
        "distributed.ProcessGroup": "_get_backend",
        "distributed.Backend.Options": "_timeout",
        "amp.GradScaler": "_step_supports_amp_scaling",
        "sys": "_getframe",
    },
    "keras": {
        "Sequential": "_flatten_layers _functional",
        "Functional": "_inputs_struct _nodes_by_depth _outputs_struct",
        "Model": "_compute_loss _layers _symbolic_build",
        "jax.Model": "_jax_state",
        "tensorflow.Model": "_maybe_symbolic_build",
        "layers.Embedding": "_call_has_training_arg _embeddings _get_call_context _inbound_nodes _set_mask_metadata _tracker "
        "_trainable_variables _untrack_variable",
        "KerasTensor": "_keras_history",
        "Optimizer": "_exclude_from_weight_decay _exclude_from_weight_decay_pattern _iterations _learning_rate "
        "_overwrite_variables_directly_with_gradients _trainable_variables_indices _var_key",
        "Variable": "_shape _value",
        "jax.trainer": "_distribute_data",
        "EpochIterator": "_get_iterator",
        "torch": "_C",
        "torch._C": "_current_graph_task_id",
    },
    "tensorflow": {
        "Module": "_flatten",
        "ResourceVariable": "_export_to_saved_model_graph _handle _read_variable_op _restore_from_tensors _serialize_to_tensors",
        "keras.optimizers.Optimizer": "_iterations _trainable_variables _use_weight_decay",
    },
    "jax": {"optax.MultiSteps": "_every_k_schedule _should_skip_update_fn _use_grad_mean"},
}


def sources(*rooms: str) -> Iterator[ast.AST]:
    for path in sorted(path for room in rooms for path in (TRAINER / room).rglob("*.py")):
        yield from ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def our_own(nodes: list[ast.AST]) -> set[str]:
    """The private names that a bridge gives itself: its functions and classes, and what it sets on its objects."""
    named = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    set_here = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    declared = {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    by_name = {
        node.args[1].value
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "__setattr__"
        if isinstance(node.args[0], ast.Name) and node.args[0].id in ("self", "layer") and isinstance(node.args[1], ast.Constant)
    }
    return {name for name in named | set_here | declared | by_name if is_private(name)}


@pytest.mark.parametrize("bridge", USED)
def test_every_private_name_that_a_bridge_uses_stands_here(bridge: str) -> None:
    nodes = list(sources(bridge))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute) and is_private(node.attr)}
    words = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    methods = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    listed = {name for names in USED[bridge].values() for name in names.split()}
    assert attributes - our_own([*nodes, *sources("bridge", "lookahead")]) - listed == set(), "used, and not listed in USED"
    assert listed - attributes - words - methods == set(), "listed, and no longer used"


@pytest.mark.parametrize(("bridge", "package"), [("keras", "keras.src"), ("tensorflow", "tensorflow.python"), ("jax", "jax._src")])
def test_private_modules_are_imported_in_one_file_of_a_bridge(bridge: str, package: str) -> None:
    files = {path.name for path in (TRAINER / bridge).rglob("*.py") if f"from {package}" in path.read_text(encoding="utf-8")}
    assert files <= {f"{bridge}_internals.py"}


@pytest.mark.parametrize(("bridge", "owner"), [(bridge, owner) for bridge, of in USED.items() for owner in of])
@pytest.mark.filterwarnings("ignore")
def test_the_installed_version_has_it(bridge: str, owner: str) -> None:
    pytest.importorskip(NEEDS[bridge], exc_type=ImportError)
    one = OBJECTS[bridge]()[owner]
    gone = [name for name in USED[bridge][owner].split() if not hasattr(one, name)]
    assert not gone, f"{bridge}: {owner} has lost {', '.join(gone)}"
