"""An open cluster, as programs hold it: connect to it, its tables, and the verbs over several of them."""

from kvemb.cluster.cluster import Cluster
from kvemb.cluster.connector import connect, nodes
from kvemb.status.cluster_status import ClusterStatus, ShardStatus

__all__ = ["Cluster", "ClusterStatus", "ShardStatus", "connect", "nodes"]
