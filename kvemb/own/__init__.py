"""Finds `trainer` and `paramserver` under names that no other program uses: `kvemb.own.trainer`, `kvemb.own.paramserver`.

Both names are common: programs have a `trainer.py`, and another distribution installs a package `trainer`. So an installed kvemb holds
both inside of this package. A checkout has them at its top, where this package looks, too. There they are imported as `trainer` and
`paramserver`, unless something else has the name: a class must not exist twice in one process, once under each name.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).resolve().parent
_CHECKOUT = None if (_HERE / "trainer").is_dir() else _HERE.parents[1]
if _CHECKOUT is not None:
    __path__.append(str(_CHECKOUT))


def import_own(name: str) -> ModuleType:
    """Import a module of `trainer` or `paramserver` by its name in the repository, also if another package has that name."""
    top = name.partition(".")[0]
    return import_module(name if _plain_name_is_ours(top) else f"{__name__}.{name}")


def facade(name: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a module that hands on another one, which is imported at first use."""

    def get(attribute: str) -> object:
        if attribute.startswith("__") and attribute != "__all__":  # inspection asks every module for these
            raise AttributeError(attribute)
        return getattr(import_own(name), attribute)

    return get, lambda: dir(import_own(name))


def _plain_name_is_ours(top: str) -> bool:
    if _CHECKOUT is None or f"{__name__}.{top}" in sys.modules:
        return False
    loaded = sys.modules.get(top)
    spec = find_spec(top) if loaded is None else None
    file = getattr(loaded, "__file__", None) if spec is None else spec.origin
    return file is not None and Path(file).resolve() == _CHECKOUT / top / "__init__.py"
