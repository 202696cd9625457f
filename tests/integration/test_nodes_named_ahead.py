"""A kvemb.yaml that names a storage node before it joins and until after it has left, as a Helm chart's does: numbers there come first."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

import kvemb
from kvemb.local_cluster import LocalCluster
from kvemb.local_cluster.storage_servers import start_servers

pytestmark = pytest.mark.full  # starts and ends of processes, of which each test needs several

PATIENCE_S = 60.0
IDS = np.arange(500)


def test_a_node_that_the_file_names_and_the_map_does_not_is_in_nobodys_way(require_server: Callable[[str], str], tmp_path: Path) -> None:
    require_server("redis-server")
    (further,) = start_servers("redis", 1, tmp_path, 64)
    try:
        with LocalCluster("redis", 2, shards=2) as cluster:
            with kvemb.connect(cluster.url) as client:
                table = client.create_table("t", dim=2, optimizer=kvemb.optim.sgd(lr=1.0), initializer=kvemb.init.zeros())
                push(table)
            started_with(cluster, further.address)
            with kvemb.connect(cluster.url) as client:
                push(client.table("t"))
                assert len(client.nodes.state().nodes) == 2
                client.nodes.begin(client.nodes.add(further.address))
                client.nodes.wait(timeout_s=PATIENCE_S)
                push(client.table("t"))
                assert len(client.nodes.state().nodes) == 3
                client.nodes.begin(client.nodes.remove(further.address))
                client.nodes.wait(timeout_s=PATIENCE_S)
                push(client.table("t"))
            started_with(cluster)
            further.process.kill()
            with kvemb.connect(cluster.url) as client:
                push(client.table("t"))
                assert (client.table("t").pull(IDS) == -5).all()
    finally:
        further.process.kill()


def push(table: kvemb.Table) -> None:
    table.push(IDS, np.ones((len(IDS), 2)))
    table.flush()


def started_with(cluster: LocalCluster, *further: str) -> None:
    """Restart every shard with a file that names these nodes, too."""
    tree = yaml.safe_load(cluster.config_path.read_text())
    tree["storage"]["nodes"] = [*(server.address for server in cluster.servers), *further]
    cluster.config_path.write_text(yaml.safe_dump(tree))
    for shard, process in enumerate(cluster.shards):
        process.kill()
        cluster.start_shard(shard)
