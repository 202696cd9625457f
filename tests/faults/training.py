"""Trainers of the ledger at work on shards that die where they are told to."""

from dataclasses import dataclass
from pathlib import Path

from chaos.cluster import FaultyCluster
from chaos.run import LedgerRun
from jobs import PATIENCE_S

from kvemb.net.deadline import Deadline

LAUNCHER = str(Path(__file__).with_name("shard_launcher.py"))


@dataclass(frozen=True)
class Training:
    """Trainers of the ledger at work.

    Args:
        run: theirs.
        points: folder in which a file of the name "<point> <shard>" ends that shard at that point; see shard_launcher.
    """

    run: LedgerRun
    points: Path

    @property
    def cluster(self) -> FaultyCluster:
        """Theirs."""
        return self.run.cluster

    def goes_on(self, n_pushes: int = 10) -> None:
        """Every trainer has so many more pushes acknowledged."""
        self.run.wait_for_acks(n_pushes, Deadline.after(2 * PATIENCE_S))

    def is_kept(self) -> None:
        """Stop, verify every row and every push so far."""
        verdict = self.run.finish()
        assert verdict.kept, f"{verdict}\n{self.run.last_words()}"
        assert verdict.pushes_acked >= 20
