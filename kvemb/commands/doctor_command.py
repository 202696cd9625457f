"""What `kvemb doctor` prints: each finding, and its mend; exit code 1 where one of them is an error."""

import argparse
import dataclasses
import json
import os

from kvemb.config import load
from kvemb.doctor.examination import examine
from kvemb.doctor.finding import ERROR
from kvemb.protocol.installed_version import installed_version


def doctor_command(args: argparse.Namespace) -> int:
    """Examine the cluster, and say what is wrong with it."""
    config = load(args.config, os.environ)
    examined = examine(config, installed_version())
    found = examined.findings
    if args.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in found]))
    else:
        for finding in found:
            print(f"{finding.level}: {finding.where}: {' '.join(finding.what.split())}\n    {finding.mend} [{finding.name}]")
        n_errors = sum(finding.level == ERROR for finding in found)
        asked = f"{examined.n_nodes} nodes and {examined.n_shards} shards"
        print(f"{asked}: {n_errors} errors, {len(found) - n_errors} warnings" if found else f"{asked}: nothing to mend")
    return 1 if any(finding.level == ERROR for finding in found) else 0
