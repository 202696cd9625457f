"""A model that Keras spreads over devices is refused by name: each device would have other rows."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("keras", exc_type=ImportError)

import keras
from keras_models import sequential

from kvemb.errors import InvalidInputError
from kvemb.keras import distribute

BACKEND = keras.backend.backend()
NOBODY = SimpleNamespace(create_table=None)  # nothing is asked of the cluster
MIRRORED = """
import keras, tensorflow as tf
from types import SimpleNamespace
from kvemb.keras import distribute
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    layers = [keras.layers.Embedding(40, 8), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
    model.compile("sgd", "mse")
try:
    distribute(model, SimpleNamespace(create_table=None), min_rows=1)
except Exception as error:
    print(type(error).__name__, error, type(model.layers[0]).__module__)
"""


@pytest.mark.skipif(BACKEND != "jax", reason="keras.distribution shares data out on JAX")
def test_keras_distribution_is_refused() -> None:
    model = sequential()
    model.compile("sgd", "mse")
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=keras.distribution.list_devices()))
    try:
        with pytest.raises(InvalidInputError, match=r"spread over devices.*Start a trainer process for each device"):
            distribute(model, NOBODY, min_rows=1, quiet=True)
    finally:
        keras.distribution.set_distribution(None)
    assert type(model.layers[0]) is keras.layers.Embedding, "nothing was changed"


@pytest.mark.timeout(400)
@pytest.mark.skipif(BACKEND != "tensorflow", reason="tf.distribute is TensorFlow's")
def test_a_strategy_of_tensorflow_is_refused() -> None:
    # In a process of its own: devices are made before TensorFlow's first step.
    told = subprocess.run(
        [sys.executable, "-c", MIRRORED], env={**os.environ, "KERAS_BACKEND": "tensorflow"}, capture_output=True, text=True, timeout=300
    )
    assert "InvalidInputError the model is spread over devices (a tf.distribute strategy" in told.stdout, told.stderr[-2000:]
    assert told.stdout.rstrip().endswith("keras.src.layers.core.embedding"), "nothing was changed"
