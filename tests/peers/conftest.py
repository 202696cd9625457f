"""Stand-ins import torch and what lies beside its tests: no doctests are looked for in them."""

collect_ignore = ["stand_ins.py"]
