"""Benchmarks: questions about speed, answered by real servers, ours and its peers interleaved in one run.

    python -m benchmarks NAME [--json FILE]        one question; NAME --help says how to read its answer

One module per question, registered in __main__. measure.py times, servers.py starts and fills real servers, ids.py draws ids, peers.py runs
other people's clients, report.py prints. Times are reported, never asserted. RESULTS.md holds the last full run.
"""
