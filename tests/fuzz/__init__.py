"""Bytes of any kind at a shard's port, and in the place of a shard's and a storage server's answers: `make fuzz`.

Inputs are the corpus (`corpus/`, and the golden messages of tests/unit), as it is and mutated. Checked: the attacked process
goes on, raises errors of ours alone, keeps its memory bounded, and honest trainers beside it are served as before.
"""
