"""The DeepFM of examples/deepfm in each framework, with its own embeddings and with ours, for the question `frameworks`.

Each framework works in a process of its own (worker.py), which benchmarks/frameworks.py drives. One module for each; problem.py is what
they have in common. problem.py, worker.py and what TFRA's module imports need NumPy and TensorFlow alone: kvemb is not installed there.
"""
