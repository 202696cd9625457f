"""Listing the rows of a server whose slots go to another one meanwhile."""

from collections.abc import Sequence
from typing import Any, cast

import pytest

from kvemb.net.deadline import Deadline
from kvemb.net.link import Link
from kvemb.stores.redis_server import stored_rows
from kvemb.wire.resp.resp_value import ErrorLine


@pytest.mark.parametrize("size", [3, stored_rows._AT_ONCE + 1])
@pytest.mark.parametrize("answer", [b"-MOVED 128 b:1", b"-ASK 128 b:1"])
def test_a_bucket_that_goes_to_another_node_while_it_is_listed_is_left_out(
    answer: bytes, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask_all(link: Link, commands: Sequence[Sequence[Any]], deadline: Deadline) -> list[Any]:
        return [size if words[0] == "HLEN" else ErrorLine(answer) for words in commands]

    monkeypatch.setattr(stored_rows, "ask_all", ask_all)
    listed = [len(rows) for rows in stored_rows.rows_in_buckets(cast(Link, None), [b"u:{tag}"], Deadline.after(60))]
    assert sum(listed) == 0
