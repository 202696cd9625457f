"""What a shard's disk and storage are waited for at the moment: said by the threads that wait, asked by everybody. Thread-safe."""


class Trouble:
    """One shard's.

    Example:
        >>> trouble = Trouble()
        >>> trouble.storage_waits("a node is away"), trouble.storage_waits("a node is away")
        (True, False)
        >>> trouble.storage_works()
        >>> str(trouble)
        ''
    """

    def __init__(self) -> None:
        self._storage = self._journal = ""

    @property
    def storage(self) -> str:
        """Why a batch is tried again, or ""."""
        return self._storage

    @property
    def journal(self) -> str:
        """Why nothing can be acknowledged, or ""."""
        return self._journal

    def storage_waits(self, why: str) -> bool:
        """Record why storage is tried again; return whether that is news."""
        before, self._storage = self._storage, why
        return why != before

    def storage_works(self) -> None:
        """Record that whatever was tried again is done."""
        self._storage = ""

    def journal_waits(self, why: str) -> bool:
        """Record why the journal is tried again; return whether that is news."""
        before, self._journal = self._journal, why
        return why != before

    def journal_works(self) -> None:
        """Record that the journal takes entries."""
        self._journal = ""

    def __str__(self) -> str:
        return "; ".join(filter(None, (self._journal, self._storage)))
