"""A faulty cluster with TLS everywhere, the proxies between the two ends that encrypt."""

from chaos.cluster import FaultyCluster
from tests.integration.encrypted_cluster import EncryptedCluster


class TlsFaultyCluster(EncryptedCluster, FaultyCluster):
    """A FaultyCluster, encrypted; a context manager."""
