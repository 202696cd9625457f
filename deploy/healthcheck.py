"""Container health check of one parameter server: exit 0 when its gRPC health service says SERVING.

python healthcheck.py HOST:PORT [--service live] [--ca FILE [--cert FILE --key FILE] [--name HOST]]

Without --service: whether the shard takes pushes; `live`: whether its process is there. --ca and what follows are for shards that speak
TLS: a certificate of any role where they ask for one, and the host name in the shard's own where that is not HOST.
"""

import argparse
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--service", default="")
    for name in ("ca", "cert", "key"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--name")
    args = parser.parse_args(words)
    with _channel(args) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=args.service), timeout=3)
        except grpc.RpcError as error:
            print(f"{args.address}: {error.code().name} {error.details()}", file=sys.stderr)
            return 1
    return 0 if reply.status == health_pb2.HealthCheckResponse.SERVING else 1


def _channel(args: argparse.Namespace) -> grpc.Channel:
    if args.ca is None:
        return grpc.insecure_channel(args.address)
    ca, key, cert = (path and path.read_bytes() for path in (args.ca, args.key, args.cert))
    options = [("grpc.ssl_target_name_override", args.name)] if args.name else []
    return grpc.secure_channel(args.address, grpc.ssl_channel_credentials(ca, key, cert), options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
