"""What importing kvemb costs."""

import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import kvemb

ROOT = Path(kvemb.__file__).parent.parent


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import kvemb", {"numpy", "grpc", "torch", "redis"}),
        ("import kvemb; kvemb.optim.adam(); kvemb.init.normal(); kvemb.errors", {"grpc", "torch"}),
        (
            "import kvemb; kvemb.connect; kvemb.Cluster; kvemb.Table; kvemb.hash_ids; "
            "kvemb.torch; kvemb.keras; kvemb.jax; kvemb.tensorflow; kvemb.columns",
            {"grpc", "torch", "multiprocessing", "importlib.metadata"},
        ),
        ("import kvemb.cli", {"numpy", "dataclasses", "importlib.metadata", "socket"}),  # what Ctrl-C may meet before main handles it
    ],
)
def test_nothing_heavy_is_imported_before_it_is_used(code: str, absent: set[str]) -> None:
    script = f"{code}\nimport sys\nprint(sorted({absent!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_every_public_name_is_there_and_listed() -> None:
    names = set(kvemb.__all__) - {"torch"}  # whose bridge is an extra
    assert all(getattr(kvemb, name) is not None for name in names)
    assert {name for name in dir(kvemb) if not name.startswith("__")} == set(kvemb.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kvemb.nothing
    with pytest.raises(AttributeError, match=r"no attribute 'lamb'; it has .*adagrad, adam, adamw.* sgd$"):
        _ = kvemb.optim.lamb  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"no attribute 'normale'; it has .*Did you mean 'normal'\?"):
        _ = kvemb.init.normale  # type: ignore[attr-defined]
    assert not hasattr(kvemb.optim, "__wrapped__")


def test_what_serves_lists_its_public_names_alone() -> None:
    assert {name for name in dir(kvemb.serve) if not name.startswith("__")} == set(kvemb.serve.__all__)


@pytest.mark.parametrize("of", ["Table", "Cluster"])
def test_help_shows_short_types(of: str) -> None:
    shown = pydoc.plain(pydoc.render_doc(getattr(kvemb, of)))
    signatures = [line for line in shown.splitlines() if line.lstrip(" |").partition("(")[0].isidentifier() and "->" in line]
    assert len(signatures) > 10
    assert not [line for line in signatures if "numpy." in line or "collections.abc." in line or "kvemb." in line]


@pytest.mark.parametrize("module", ["kvemb.schema.table_def", "kvemb.api", "kvemb.init", "kvemb.arrays.row_index"])
def test_numpy_1_is_refused_with_the_reason(module: str) -> None:
    script = f"import numpy; numpy.__version__ = '1.26.4'; import {module}"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("kvemb.errors.ConfigError: NumPy 1.26.4 is installed, kvemb needs 2.0 or newer")
