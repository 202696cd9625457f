"""A harness that breaks things on purpose: processes, storage servers, the network between them, and a ledger that tells what survived.

For tests (pytest puts tests/ on the path, so they import it as `chaos`), for `make chaos`, and mounted into containers by tests/containers.
"""
