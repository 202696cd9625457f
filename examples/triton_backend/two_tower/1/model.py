"""A recommender for Triton's Python backend: rows from the cluster as they are now, scores by an exported torch program.

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
import torch
import triton_python_backend_utils as pb_utils

import kvemb.serve
from kvemb.errors import InvalidInputError, KvembError

USERS, ITEMS = "two_tower.user", "two_tower.item"


class TritonPythonModel:
    """The class that Triton looks for."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the exported program and open the cluster, once."""
        here, config = Path(__file__).parent, json.loads(args["model_config"])
        settings = {name: value["string_value"] for name, value in config["parameters"].items()}
        self._n_best = next(int(output["dims"][0]) for output in config["output"] if output["name"] == "item")
        self._items = np.load(here / "items.npy")
        self._scores = torch.export.load(here / "scores.pt2").module()
        self._client = kvemb.serve.connect(settings["kvemb_yaml"], timeout_ms=float(settings["timeout_ms"]))
        self._client.lookup_tables({USERS: [0], ITEMS: self._items}, timeout_ms=10_000)  # opens the tables; the first request need not

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return a response for each request, in their order; each has "user", int64 [b, 1]."""
        users = [pb_utils.get_input_tensor_by_name(request, "user").as_numpy().reshape(-1) for request in requests]
        try:
            found = self._client.lookup_tables({USERS: np.concatenate(users), ITEMS: self._items})
        except InvalidInputError as error:  # an id that cannot be: it fails its own request, and no other
            if len(requests) > 1:
                return [self.execute([request])[0] for request in requests]
            return [_refused(error, pb_utils.TritonError.INVALID_ARG)]
        except KvembError as error:
            return [_refused(error, pb_utils.TritonError.UNAVAILABLE) for _ in requests]
        with torch.inference_mode():
            best = self._scores(torch.from_numpy(found[USERS]), torch.from_numpy(found[ITEMS])).topk(self._n_best)
        ends = np.cumsum([len(some) for some in users])[:-1]
        parts = zip(np.split(self._items[best.indices.numpy()], ends), np.split(best.values.numpy(), ends), strict=True)
        return [
            pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("item", items), pb_utils.Tensor("score", scores)])
            for items, scores in parts
        ]

    def finalize(self) -> None:
        """Close the cluster, before Triton unloads the model."""
        self._client.close()


def _refused(error: KvembError, code: Any) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code))
