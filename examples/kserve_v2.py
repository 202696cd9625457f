"""A recommender over gRPC in the words of the Open Inference Protocol, KServe's v2: any client of KServe, Triton or Seldon can ask it.

    pip install grpcio-tools
    python examples/kserve_v2.py                                          # trains a model on a cluster for this run, and serves it
    python examples/kserve_v2.py --config kvemb.yaml --model FOLDER       # serves what stands there; serving_web.py prints both

The model `two_tower` takes `user`, INT64 [b], and gives the K best items of each, `item`, INT64 [b, K], and `score`, FP32 [b, K]. Rows are
read as they are now, and no trainer is needed. The caller's deadline is that of the look-up.
"""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from dlrm.place import add_arguments
from two_tower.online import add_sizes, trained
from two_tower.served import Recommender

import kvemb
from kvemb.cli import exit_in_order
from kvemb.errors import InvalidInputError, KvembError, StorageError

MODEL, K, N_THREADS, LONGEST_S = "two_tower", 10, 8, 1.0
words, services = grpc.protos_and_services("kserve_v2.proto")  # compiled now, by grpcio-tools


class InferenceServer(services.GRPCInferenceServiceServicer):
    """Answers for one model; errors are statuses of gRPC, as the protocol has it."""

    def __init__(self, recommender: Recommender) -> None:
        self._recommender = recommender

    def ServerLive(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 (gRPC's names)
        return words.ServerLiveResponse(live=True)

    def ServerReady(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return words.ServerReadyResponse(ready=self._is_ready())

    def ModelReady(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return words.ModelReadyResponse(ready=request.name == MODEL and request.version in ("", "1") and self._is_ready())

    def ServerMetadata(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return words.ServerMetadataResponse(name="kvemb", version=kvemb.__version__)

    def ModelMetadata(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        _require_model(request.name, request.version, context)
        tensor = words.ModelMetadataResponse.TensorMetadata
        outputs = [tensor(name="item", datatype="INT64", shape=[-1, K]), tensor(name="score", datatype="FP32", shape=[-1, K])]
        inputs = [tensor(name="user", datatype="INT64", shape=[-1])]
        return words.ModelMetadataResponse(name=MODEL, versions=["1"], platform="kvemb", inputs=inputs, outputs=outputs)

    def ModelInfer(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        _require_model(request.model_name, request.model_version, context)
        left_s = context.time_remaining()  # None where the caller sets no deadline
        timeout_s = LONGEST_S if left_s is None else min(left_s, LONGEST_S)
        try:
            wanted = _outputs(request)
            items, scores = self._recommender.recommend(_users(request), K, timeout_s * 1e3)
        except InvalidInputError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except StorageError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        answer = words.ModelInferResponse(model_name=MODEL, model_version="1", id=request.id)
        for name in wanted:
            values, datatype = (items, "INT64") if name == "item" else (scores, "FP32")
            output = answer.outputs.add(name=name, datatype=datatype, shape=values.shape)
            if request.raw_input_contents:  # answered in the form that was asked in
                answer.raw_output_contents.append(values.tobytes())
            else:
                (output.contents.int64_contents if name == "item" else output.contents.fp32_contents).extend(values.ravel().tolist())
        return answer

    def _is_ready(self) -> bool:
        try:
            self._recommender.recommend([0], 1)
        except StorageError:
            return False
        return True


def _users(request: Any) -> np.ndarray:
    """Return the users of a request, int64 [b], from either form that the protocol has."""
    if [(one.name, one.datatype, len(one.shape)) for one in request.inputs] != [("user", "INT64", 1)]:
        raise InvalidInputError("give one input: user, INT64, of shape [b]")
    raw, given = request.raw_input_contents, request.inputs[0]
    if len(raw) > 1 or (raw and (len(raw[0]) % 8 or given.contents.int64_contents)):
        raise InvalidInputError("give the values of user once: in raw_input_contents, 8 bytes each, or in contents")
    users = np.frombuffer(raw[0], "<i8") if raw else np.array(given.contents.int64_contents, np.int64)
    if list(users.shape) != list(given.shape):
        raise InvalidInputError(f"user has {len(users)} values, and its shape is {list(given.shape)}")
    return users


def _outputs(request: Any) -> list[str]:
    wanted = [output.name for output in request.outputs] or ["item", "score"]
    if not {"item", "score"}.issuperset(wanted):
        raise InvalidInputError(f"the outputs are item and score; asked for: {', '.join(wanted)}")
    return wanted


def _require_model(name: str, version: str, context: grpc.ServicerContext) -> None:
    if name != MODEL or version not in ("", "1"):
        context.abort(grpc.StatusCode.NOT_FOUND, f"there is no model {name!r} of version {version!r}; there is {MODEL!r}, version 1")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; 0, or 1 after an error that was told in one line on standard error."""
    parser = argparse.ArgumentParser(description="Serve a recommender over gRPC in KServe's v2 words.")
    add_arguments(parser, local=False)
    add_sizes(parser)
    parser.add_argument("--model", metavar="FOLDER", type=Path, help="serve this one, trained on the cluster of --config; train nothing")
    parser.add_argument("--port", type=int, default=8001, help="on this machine alone (default 8001; 0: any)")
    args = parser.parse_args(argv)
    if args.model and not args.config:
        parser.error("--model needs --config, the cluster that has its rows")
    try:
        with ExitStack() as stack:
            if args.model:
                url, folder = args.config, args.model
            else:
                model = stack.enter_context(trained(args))
                url, folder = model.url, model.folder
            recommender = stack.enter_context(Recommender(url, folder))
            server = grpc.server(ThreadPoolExecutor(N_THREADS), maximum_concurrent_rpcs=4 * N_THREADS)
            services.add_GRPCInferenceServiceServicer_to_server(InferenceServer(recommender), server)
            port = server.add_insecure_port(f"127.0.0.1:{args.port}")
            server.start()
            stack.callback(lambda: server.stop(1).wait())
            print(f"serving {MODEL} at 127.0.0.1:{port}", flush=True)
            server.wait_for_termination()
    except KvembError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    exit_in_order()
    sys.exit(main())
