"""One trainer of the demo, a process of its own: python -m kvemb.demo.trainer_process --help

Talks to the job that started it in lines: JSON progress on standard output; before each pass it waits for a line on standard input, so
that the held-out loss of a pass is measured when every trainer has finished it. It ends when standard input does.
"""

import argparse
import json
import sys
from dataclasses import asdict

from kvemb.cluster import connect
from kvemb.demo.cluster_rows import ClusterRows
from kvemb.demo.corpus import load
from kvemb.demo.skipgram import TrainingProgress, train_pass
from kvemb.errors import KvembError


def main() -> int:
    """Run the trainer; see the module."""
    parser = argparse.ArgumentParser(prog="python -m kvemb.demo.trainer_process", description=__doc__)
    parser.add_argument("--config", required=True, help="kvemb.yaml or its file:// URL")
    parser.add_argument("--trainer", type=int, required=True, help="this trainer's index")
    parser.add_argument("--trainers", type=int, required=True, help="number of trainers")
    parser.add_argument("--seed", type=int, required=True, help="seed of the run")
    args = parser.parse_args()
    try:
        _train(args)
    except KvembError as error:
        print(f"trainer {args.trainer}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _train(args: argparse.Namespace) -> None:
    corpus = load()
    with connect(args.config) as cluster:
        rows = ClusterRows(cluster)
        _say({"ready": True})
        for pass_index, _ in enumerate(sys.stdin):
            train_pass(
                rows,
                corpus,
                pass_index=pass_index,
                trainer=args.trainer,
                n_trainers=args.trainers,
                seed=args.seed,
                report=_report,
            )
            rows.flush()
            _say({"pass_done": pass_index})


def _report(progress: TrainingProgress) -> None:
    _say({"progress": asdict(progress)})


def _say(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    sys.exit(main())
