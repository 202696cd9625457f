"""The store contract on storage servers in containers, by testcontainers: the images that docker-compose.yml runs pass it too."""

from collections.abc import Iterator

import pytest
from container_servers import ContainerNodes

from kvemb.testing.bucket_contract import BucketedStoreContract
from kvemb.testing.store_contract import Nodes, StoreContract


class _InContainers(StoreContract):
    kind = ""
    n_nodes = 2

    @pytest.fixture(scope="class")
    @classmethod
    def running(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContainerNodes]:
        folder = tmp_path_factory.mktemp(cls.kind)
        folder.chmod(0o777)  # the servers run under users of their own
        nodes = ContainerNodes(cls.kind, cls.n_nodes, folder)
        yield nodes
        nodes.close()

    @pytest.fixture
    def nodes(self, running: ContainerNodes) -> Iterator[Nodes]:
        running.reset()
        yield running
        for index in range(self.n_nodes):
            if running.servers[index].process.poll() is None:
                running.resume(index)


class TestMemcachedContainers(_InContainers):
    kind = "memcached"


class TestRedisContainers(_InContainers, BucketedStoreContract):
    kind = "redis"


class TestValkeyContainers(_InContainers, BucketedStoreContract):
    kind = "valkey"


@pytest.mark.long  # the composed Redis Cluster is tested every time
class TestRedisClusterContainers(_InContainers, BucketedStoreContract):
    kind = "redis-cluster"
    n_nodes = 3
