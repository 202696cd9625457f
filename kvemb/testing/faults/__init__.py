"""A harness that breaks things on purpose: processes, storage servers, the network between them, and a ledger that tells what survived.

For tests, and for `python -m kvemb.testing.faults.chaos`. Nothing of the product imports it.
"""
