"""A trainer of any release, by public names only: `python counting_trainer.py KVEMB_YAML TRAINER FILE`; ends at SIGTERM.

Its push n adds one to a row of its own and to rows that it shares, so that rows tell of a push that was lost or applied twice. What was
acknowledged stands in FILE, from which it goes on when it is started again.
"""

import signal
import sys
import time
from pathlib import Path

import numpy as np

import kvemb

TABLE, DIM, SHARED = "counts", 2, 64
_PAUSE_S = 0.1


def ids_of(trainer: int, n: int) -> np.ndarray:
    """The rows of a push: one that no other push touches, and five that all trainers do; int64 [6]."""
    return np.array([(trainer + 1) << 32 | n, *((n * 5 + np.arange(5)) % SHARED)])


def main() -> None:
    """Push until told to end; every push is acknowledged before the next one."""
    config, trainer, file = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    n = int(file.read_text()) if file.exists() else 0
    with kvemb.connect(config, trainer=f"t{trainer}", timeout_s=60) as cluster:
        table = cluster.table(TABLE)
        while not told:
            n += 1
            ids = ids_of(trainer, n)
            table.pull(ids)
            table.push(ids, np.full((len(ids), DIM), -1.0, np.float32)).wait(timeout_s=120)
            file.with_suffix(".new").write_text(str(n))
            file.with_suffix(".new").replace(file)
            time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main()
