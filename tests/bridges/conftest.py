"""The contract of all bridges: no file here is searched for doctests."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow greets with pages otherwise; read when it is imported

collect_ignore = ["conftest.py", "behaviours.py", "jax_side.py", "keras_side.py", "other_trainer.py", "tensorflow_side.py", "torch_side.py"]
