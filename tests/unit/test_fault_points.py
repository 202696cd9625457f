"""Points of the code at which fault tests end a shard."""

import subprocess
import sys
from pathlib import Path

FAULTS = Path(__file__).parent.parent / "faults"


def test_every_point_at_which_fault_tests_end_a_shard_is_in_the_code() -> None:
    # In a process of its own: it replaces functions of the product.
    code = f"import sys; sys.path.insert(0, {str(FAULTS)!r}); from shard_launcher import install; install('0')"
    done = subprocess.run([sys.executable, "-c", code], cwd=FAULTS.parent.parent, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
