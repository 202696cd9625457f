"""An open cluster, as programs hold it: connect to it, its tables, and the verbs over several of them."""

from kvemb.api.cluster import Cluster
from kvemb.api.connector import connect, nodes
from kvemb.operate.cluster_status import ClusterStatus, ShardStatus

__all__ = ["Cluster", "ClusterStatus", "ShardStatus", "connect", "nodes"]
