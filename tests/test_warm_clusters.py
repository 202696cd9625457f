"""A cluster that a test leaves as it was is the next one's; any other is ended."""

import kvemb
from tests.warm_clusters import warm


def test_a_cluster_is_handed_on_without_its_tables_until_a_test_changes_it() -> None:
    with warm(index_mb=7) as first, kvemb.connect(first.url) as cluster:
        table = cluster.create_table("t", dim=2, optimizer=kvemb.optim.sgd(lr=1.0))
        table.push([1, 2], [[1.0, 1.0]] * 2).wait_applied()
    with warm(index_mb=7) as second:
        assert second is first
        with kvemb.connect(second.url) as cluster:
            assert cluster.tables() == []
        second.shards[0].kill()
        second.start_shard(0)
    with warm(index_mb=7) as third:
        assert third is first
        third.servers[0].restart()
    with warm(index_mb=7) as fourth:
        assert fourth is not first
        assert first.shards[0].poll() is not None
