"""What this bridge imports from TensorFlow's private modules. tests/bridges/test_private_names.py names one that has gone."""

from tensorflow.python.eager import wrap_function  # WrappedFunction.prune, which tf.compat.v1.wrap_function gives for TF1's code only
from tensorflow.python.ops import resource_variable_ops  # ResourceVariable, which tf.Variable makes, and which has no public name
from tensorflow.python.trackable.base import VARIABLE_VALUE_KEY

__all__ = ["VARIABLE_VALUE_KEY", "resource_variable_ops", "wrap_function"]
