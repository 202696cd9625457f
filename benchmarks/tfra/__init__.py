"""TFRA (TensorFlow Recommenders Addons) as a peer on Redis: worker.py runs in its own virtual environment, peer.py drives it from here.

`make bench-peers` sets the environment up. What must not live here: anything of ours that is measured.
"""
