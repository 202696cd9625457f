"""A real cluster on this machine: storage servers and parameter-server shards as processes of their own, cleaned up at exit."""

from kvemb.local_cluster.launcher import LocalCluster, local

__all__ = ["LocalCluster", "local"]
