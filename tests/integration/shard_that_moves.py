"""The program of test_moved_shards.py, with an /etc/hosts of its own: call a shard, start it at another address of the same name, call it.

python -m tests.integration.shard_that_moves PORT
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from kvemb.client.shard_channel import ShardChannel
from kvemb.net.deadline import Deadline
from kvemb.protocol.messages import SERVICE, Empty, Reply
from kvemb.protocol.verb import EVERYBODY, Verb

NAME = "shard-0.moves.test"
HOSTS = Path("/etc/hosts")
PATIENCE_S = 15.0  # gRPC by itself looks a name up again after 30 s
LOOK = Verb("Describe", Empty, Empty, EVERYBODY, repeatable=True)


def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
    return Reply({}, Empty().encode()).encode()


def serve(address: str) -> grpc.Server:
    """Put an address under the name, and start a shard that answers one verb there."""
    host = address.partition(":")[0]
    HOSTS.write_text(f"127.0.0.1 localhost\n{host} {NAME}\n", encoding="utf-8")
    server = grpc.server(ThreadPoolExecutor(2), options=(("grpc.so_reuseport", 0),))
    handler = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Describe": handler}),))
    assert server.add_insecure_port(address)
    server.start()
    return server


def main(port: str) -> None:
    channel = ShardChannel(0, f"{NAME}:{port}")
    for host in ("127.0.0.2", "127.0.0.3"):
        server = serve(f"{host}:{port}")
        channel.call(LOOK, Empty(), Deadline.after(PATIENCE_S))
        print(f"reached at {host}", flush=True)
        server.stop(0).wait()


if __name__ == "__main__":
    main(sys.argv[1])
