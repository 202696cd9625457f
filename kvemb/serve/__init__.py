"""A client that serves: rows read-only, from a cache that the feed keeps fresh, within a deadline, whatever storage does.

    import kvemb.serve
    with kvemb.serve.connect("kvemb.yaml", unknown={"user": "zeros"}) as client:
        rows = client.lookup("user", [7, 8])

See docs/serve.md.
"""

from kvemb.serve.served_model import Model
from kvemb.serve.served_tables import ServedFrom
from kvemb.serve.serving_client import MeanOf, ServingClient, connect

__all__ = ["MeanOf", "Model", "ServedFrom", "ServingClient", "connect"]


def __dir__() -> list[str]:
    return [*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__"]
