"""The process that a step was made in. In a fork of it TensorFlow and JAX have no threads: a step there would wait for them for ever.

What must not live here: connections, which see to that themselves (`kvemb.client.all_shards`, `kvemb.net.pool`).
"""

import os

from kvemb.errors import ClosedError


class OwnProcess:
    """The process that makes this object.

    Args:
        framework: whose threads belong to it.
    """

    def __init__(self, framework: str) -> None:
        self._framework, self._pid = framework, os.getpid()

    def check(self) -> None:
        """Raise in a fork.

        Raises:
            ClosedError: nothing was computed, pulled or pushed.
        """
        if os.getpid() != self._pid:
            raise ClosedError(
                f"this step was made in process {self._pid}, and this is a fork of it, in which {self._framework} has no threads and would "
                "hang. Here rows can be pulled (table.pull); to train or evaluate, start the process with 'spawn' or 'forkserver', and "
                "call kvemb.connect() in it"
            )
