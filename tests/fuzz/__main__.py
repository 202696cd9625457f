"""`make fuzz`, or `python -m tests.fuzz`: every target for its share of the time, one after the other, and what came of it.

An input that does harm is written to the folder of `--keep`; put into the corpus, it is tried first in every run from then on.
"""

import argparse
import hashlib
import random
import secrets
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.client_side import MemcachedAnswers, RedisAnswers, ShardAnswers
from tests.fuzz.run import fuzz
from tests.fuzz.shard_port import Frames, Messages, OverTls
from tests.fuzz.target import Target

TARGETS: dict[str, type[Target]] = {made.name: made for made in (Frames, Messages, OverTls, RedisAnswers, MemcachedAnswers, ShardAnswers)}


def main(argv: list[str] | None = None) -> int:
    """Fuzz; return 0 when nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Bytes of any kind against shards and clients.")
    parser.add_argument("--seconds", type=float, default=300.0, help="in all")
    parser.add_argument("--seed", type=int, help="of every choice; drawn unless given")
    parser.add_argument("--only", action="append", default=[], choices=sorted(TARGETS), help="just this target; may be repeated")
    parser.add_argument("--keep", type=Path, default=Path(), help="folder for an input that does harm")
    args = parser.parse_args(argv)
    seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    chosen = args.only or list(TARGETS)
    print(f"seed {seed}, {args.seconds:g} s, targets: {', '.join(chosen)}", flush=True)
    ok = True
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder, TARGETS[name](Path(folder), random.Random(f"{seed}-{name}")) as target:
            report = fuzz(target, args.seconds / len(chosen))
        print(report, flush=True)
        if report.trouble:
            ok = False
            path = args.keep / f"{name}-{hashlib.sha256(report.last).hexdigest()[:12]}.bin"
            path.write_bytes(report.last)
            print(f"the last input before that is in {path}; seed {seed}", flush=True)
    print(f"seed {seed}: {'nothing found' if ok else 'FOUND'}, {time.process_time():.0f} s of this process's CPU time", flush=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
