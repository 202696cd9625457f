"""Import + pull/push smoke test of an installed kvemb: python smoke.py

CI runs it on the built wheel, outside the checkout; pytest leaves it alone. It starts a real cluster (two Valkey nodes,
two parameter servers), trains two steps of SGD and checks every number.
"""

import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np

LR = 0.5


def check(condition: bool, what: str) -> None:
    """Fail with a message; `assert` would vanish under python -O."""
    if not condition:
        sys.exit(f"smoke: FAILED: {what}")


def check_installation() -> None:
    import kvemb
    from kvemb.config import StorageConfig
    from kvemb.stores.storage_kinds import KINDS, open_store
    from kvemb.trainer import prefetch

    top = Path(kvemb.__file__).parent
    for folder in (top, top / "own" / "paramserver", top / "own" / "trainer"):
        check((folder / "py.typed").is_file(), f"{folder}/py.typed is missing")
    for name in ("paramserver", "trainer"):  # names that programs and other distributions use
        check(find_spec(name) is None, f"{name} was installed as a package of its own")
    check(prefetch.__module__.startswith("kvemb.own.trainer."), f"prefetch is of {prefetch.__module__}")
    for kind in KINDS:
        open_store(StorageConfig(kind, ("127.0.0.1:1",)), role="trainer").close()  # nothing connects before `open`
    check("torch" not in sys.modules, "importing kvemb and trainer imported torch")


def check_training() -> None:
    import kvemb

    ids = np.array([3, 7, 3, 2**40 + 1])  # 3 twice: gradients of duplicate ids are summed
    grads = np.arange(ids.size * 16, dtype=np.float32).reshape(ids.size, 16) / 64
    summed = np.stack([grads[ids == i].sum(axis=0) for i in ids])
    with kvemb.local(store="valkey", nodes=2, shards=2) as url, kvemb.connect(url) as cluster:
        users = cluster.create_table(
            "user",
            dim=16,
            exist_ok=True,
            optimizer=kvemb.optim.sgd(lr=LR),
            initializer=kvemb.init.normal(std=0.01),
        )
        expected = users.pull(ids)
        check(expected.shape == (4, 16), f"pull: shape {expected.shape}")
        check(np.array_equal(expected, users.pull(ids)), "two pulls of unseen ids differ")
        check(len(users) == 0, "a pull created rows")
        for _ in range(2):
            users.push(ids, grads).wait(timeout_s=30)
            users.flush()
            expected = expected - LR * summed
        check(np.allclose(users.pull(ids), expected, rtol=1e-5, atol=1e-6), "rows after two steps of SGD are wrong")
        check(len(users) == 3, f"len: got {len(users)} rows, expected 3")


if __name__ == "__main__":
    check_installation()
    check_training()
    print(f"smoke: ok, kvemb {version('kvemb')} from {Path(sys.prefix)}")
