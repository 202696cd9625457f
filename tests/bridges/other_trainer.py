"""The second of two trainers of a sync job: a process that takes its part of each batch, and prints its losses.

Arguments: the cluster's URL, the framework's side, the tables' name.
"""

import json
import sys
from importlib import import_module

import behaviours

import kvemb


def main(url: str, side: str, name: str) -> None:
    of = import_module(side)
    with kvemb.connect(url, trainer="second", timeout_s=120) as cluster:
        made = {feature: cluster.table(f"{name}.{feature}") for feature in ("user", "item")}
        trained = of.Trained(made)
        print(json.dumps([trained.step(half) for half in behaviours.halves(1, of.REPEATS)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
