"""A recommender for Triton's Python backend: rows from the cluster as they are now, and the dense part that the trainer exported.

    pip install kvemb torch                                                      # into the Python of Triton's image
    python examples/serving_web.py                                               # trains a model; prints `rows:` and `model:`
    cp MODEL/scores.pt2 MODEL/items.npy examples/triton_backend/two_tower/1/
    tritonserver --model-repository examples/triton_backend

`kvemb_yaml` in config.pbtxt names the cluster. No parameter server and no trainer has to be there. Whatever requests Triton's batcher has
collected are looked up together. Source: https://github.com/triton-inference-server/python_backend#usage
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

import kvemb.serve
from kvemb.errors import InvalidInputError, KvembError


class TritonPythonModel:
    """The class that Triton looks for."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the cluster and load the dense part, once."""
        here, config = Path(__file__).parent, json.loads(args["model_config"])
        settings = {name: value["string_value"] for name, value in config["parameters"].items()}
        self._n_best = next(int(output["dims"][0]) for output in config["output"] if output["name"] == "item")
        self._items = np.load(here / "items.npy")
        self._client = kvemb.serve.connect(settings["kvemb_yaml"], timeout_ms=float(settings["timeout_ms"]))
        self._model = kvemb.serve.Model(self._client, here / "scores.pt2")
        self._model({"user": [0], "item": self._items}, timeout_ms=10_000)  # opens the tables, so that the first request need not

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return a response for each request, in their order; each has "user", int64 [b, 1]."""
        users = [pb_utils.get_input_tensor_by_name(request, "user").as_numpy().reshape(-1) for request in requests]
        try:
            scores = self._model({"user": np.concatenate(users), "item": self._items})
        except InvalidInputError as error:  # an id that cannot be: it fails its own request, and no other
            if len(requests) > 1:
                return [self.execute([request])[0] for request in requests]
            return [_refused(error, pb_utils.TritonError.INVALID_ARG)]
        except KvembError as error:
            return [_refused(error, pb_utils.TritonError.UNAVAILABLE) for _ in requests]
        best = np.argsort(-scores, axis=1)[:, : self._n_best]
        ends = np.cumsum([len(some) for some in users])[:-1]
        parts = zip(np.split(self._items[best], ends), np.split(np.take_along_axis(scores, best, axis=1), ends), strict=True)
        return [
            pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("item", items), pb_utils.Tensor("score", values)])
            for items, values in parts
        ]

    def finalize(self) -> None:
        """Close the cluster, before Triton unloads the model."""
        self._client.close()


def _refused(error: KvembError, code: Any) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code))
