"""`kvemb doctor --conformance URL`: can a server that speaks RESP hold rows? Check by check, with what each that misses would cost."""

import argparse
import dataclasses
import json
import os
import sys
from importlib.util import find_spec

from kvemb.errors import ConfigError, n_of
from kvemb.projection.projection_target import TargetUrl


def conformance_command(args: argparse.Namespace) -> int:
    """Examine the server; the exit code is 1 if it lacks something that is needed."""
    url = TargetUrl.parse(args.conformance, ())
    server = url.server(os.environ, args.password_env)
    if url.encrypted:
        raise ConfigError("--conformance: takes redis:// alone, without encryption; which commands a server has does not depend on it")
    if find_spec("pytest") is None:
        raise ConfigError("--conformance: the contract of a store is written as tests: pip install pytest, or kvemb[dev]")
    os.environ.pop("PYTEST_ADDOPTS", None)  # the user's, of tests of their own
    from kvemb.testing.conformance import HOLDS, MISSING, ServerCheck, ServerExamination

    out, words = sys.stdout, {HOLDS: "holds", MISSING: "MISSING"}

    def report(check: ServerCheck) -> None:
        if args.json:
            return
        said = f": {check.said}" if check.said else ""
        costs = f"\n    {'costs' if check.needed else 'would be good; without,'} {check.costs}" if check.costs else ""
        print(f"{words.get(check.outcome, check.outcome)}: {check.name}{said}{costs}", file=out, flush=True)

    examination = ServerExamination(server, report)
    if not args.json:
        print(f"scratch keys begin with {examination.prefix} and are deleted at the end", file=out, flush=True)
    examination.run()
    if args.json:
        checks = [dataclasses.asdict(check) for check in examination.checks]
        print(json.dumps({"server": examination.server, "fits": examination.fits, "checks": checks}))
        return 0 if examination.fits else 1
    counts = [sum(check.outcome == outcome for check in examination.checks) for outcome in (HOLDS, MISSING)]
    tried = f"{n_of(counts[0], 'check')} hold, {counts[1]} miss, {len(examination.checks) - sum(counts)} were not tried"
    verdict = "can hold rows" if examination.fits else "is refused: kvemb's promises would not hold on it"
    print(f"{server.nodes[0]}, {examination.server}, {verdict} ({tried})", file=out)
    return 0 if examination.fits else 1
