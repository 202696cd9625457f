"""The exchange over socket pairs, against a scripted peer in a thread: slices, stalls, resets, and bytes without a request."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest
from numpy.typing import NDArray

from kvemb.errors import ClosedError, DeadlineExceededError, NodeUnavailableError, ProtocolError
from kvemb.net.deadline import Deadline
from kvemb.net.exchange import WINDOW_STEPS, Conversation, run
from kvemb.net.link import Link, connect_link
from kvemb.net.pool import LinkPool
from kvemb.wire.fixed_size_values import FixedSizeValuesReply
from kvemb.wire.replies import LineReply, ReplyReader, Step
from kvemb.wire.resp.integer_replies import IntegerReplies

Peer = Callable[[socket.socket], None]


def lines(n: int, request: bytes = b"PING\r\n") -> list[Step]:
    return [Step(memoryview(request), LineReply()) for _ in range(n)]


def values(n: int) -> tuple[Step, FixedSizeValuesReply]:
    reply = FixedSizeValuesReply(b"$4\r\n", 4, b"$-1\r\n", np.zeros((n, 4), dtype=np.uint8), np.zeros(n, dtype=bool))
    return Step(memoryview(b"GET\r\n"), reply), reply


def answer_each(sock: socket.socket, answer: bytes = b"+PONG\r\n") -> None:
    """Answer every line that comes, until the other side closes."""
    while data := sock.recv(1 << 16):
        sock.sendall(answer * data.count(b"\n"))


def say(*pieces: bytes) -> Peer:
    def peer(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        for piece in pieces:
            sock.sendall(piece)
        sock.recv(1)  # until the other side closes

    return peer


def hang_up(sock: socket.socket) -> None:
    """Reset the connection, not just end it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.fixture
def link_to() -> Iterator[Callable[[Peer, str], Link]]:
    """`link_to(peer, name)`: a link over TCP on loopback whose other end a thread plays."""
    threads: list[threading.Thread] = []
    links: list[Link] = []

    def make(peer: Peer, name: str = "peer:1") -> Link:
        def play(sock: socket.socket) -> None:
            with sock, suppress(OSError):  # the test closed its end
                peer(sock)

        with socket.create_server(("127.0.0.1", 0)) as server:
            near = socket.create_connection(server.getsockname())
            far, _ = server.accept()
        far.settimeout(30)
        thread = threading.Thread(target=play, args=(far,), name=f"peer {name}")
        thread.start()
        threads.append(thread)
        links.append(Link(near, name))
        return links[-1]

    yield make
    for link in links:
        link.close()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_replies_that_come_byte_by_byte_are_read(link_to: Callable[..., Link]) -> None:
    stream = b"$4\r\nabcd\r\n$-1\r\n$4\r\n\r\n$-\r\n" + b"+OK\r\n"
    step, reply = values(3)
    last = LineReply()
    run(
        [Conversation(link_to(say(*(stream[i : i + 1] for i in range(len(stream))))), [step, Step(memoryview(b"X"), last)])],
        Deadline.after(20),
    )
    assert reply.found.tolist() == [True, False, True]
    assert (reply.out[2].tobytes(), last.line) == (b"\r\n$-", b"+OK")


def test_many_more_steps_than_the_window_are_all_answered(link_to: Callable[..., Link]) -> None:
    links = [link_to(answer_each, f"peer:{i}") for i in range(3)]
    batches = [lines(count) for count in (1, WINDOW_STEPS, 500)]
    run([Conversation(link, steps) for link, steps in zip(links, batches, strict=True)], Deadline.after(20))
    assert all(step.reply.line == b"+PONG" for steps in batches for step in steps)  # type: ignore[attr-defined]
    run([Conversation(links[0], [])], Deadline.after(20))
    run([], Deadline.after(20))


def test_short_replies_where_long_ones_were_expected_are_read_all_the_same(link_to: Callable[..., Link]) -> None:
    """After a full reply the kernel is asked to hold small pieces back; rows that are missing make only small ones."""
    n, size = 180, 400
    head = b"$400\r\n"
    hits, misses = (head + b"x" * size + b"\r\n") * n, b"$-1\r\n" * n

    def full_then_empty(sock: socket.socket) -> None:
        for _ in range(2):
            asked = b""
            while asked.count(b"GET") < WINDOW_STEPS:
                asked += sock.recv(1 << 16)
            sock.sendall(hits)
            sock.recv(1 << 16)  # the last request comes when the first reply has been read
            sock.sendall(misses * WINDOW_STEPS)
        sock.recv(1)

    links = [link_to(full_then_empty, f"peer:{i}") for i in range(2)]
    for _ in range(2):  # the second batch finds the link as the first one found it
        batches = []
        for _ in links:
            replies = [
                FixedSizeValuesReply(head, size, b"$-1\r\n", np.zeros((n, size), np.uint8), np.zeros(n, dtype=bool))
                for _ in range(WINDOW_STEPS + 1)
            ]
            batches.append([Step(memoryview(b"GET\r\n"), reply, len(hits)) for reply in replies])
        conversations = [Conversation(link, steps) for link, steps in zip(links, batches, strict=True)]
        run(conversations, Deadline.after(20))
        for steps in batches:
            found = [step.reply.found for step in steps]  # type: ignore[attr-defined]
            assert found[0].all()
            assert not np.concatenate(found[1:]).any()


class Counting(Link):
    """Counts how often it is looked at, and wakes the thread that waits for that."""

    def __init__(self, link: Link, looked: threading.Event) -> None:
        super().__init__(link.sock, link.address)
        self.n_looks, self._looked = 0, looked

    def receive(self) -> int:
        self.n_looks += 1
        self._looked.set()
        return super().receive()


def integers(n: int) -> Step:
    return Step(memoryview(b"HSET\r\n"), IntegerReplies(b":", 9, np.full(n, 9, np.uint8)))


def test_small_answers_that_are_certain_to_come_wake_nobody_one_by_one(link_to: Callable[..., Link]) -> None:
    looked = threading.Event()

    def one_by_one(sock: socket.socket) -> None:
        for _ in range(2):
            asked = b""
            while asked.count(b"\n") < 3:
                more = sock.recv(1 << 16)
                if not more:  # the test has failed
                    return
                asked += more
            for _ in range(21):
                looked.clear()
                sock.sendall(b":0\r\n")
                looked.wait(0.001)  # the other side has its chance
        sock.recv(1)

    link = Counting(link_to(one_by_one), looked)
    for _ in range(2):  # the second batch finds the link as the first one found it
        link.n_looks = 0
        steps = [integers(7) for _ in range(3)]
        run([Conversation(link, steps)], Deadline.after(20))
        assert all(step.reply.done for step in steps)
        assert link.n_looks <= 4


def test_an_answer_shorter_than_any_is_not_waited_for_until_the_deadline(link_to: Callable[..., Link]) -> None:
    with pytest.raises(ProtocolError, match="expected an integer"):
        run([Conversation(link_to(say(b":0\r\n" * 98 + b"?\r\n")), [integers(100)])], Deadline.after(600))


def test_no_more_than_the_window_is_in_flight(link_to: Callable[..., Link]) -> None:
    most: list[int] = []

    def count(sock: socket.socket) -> None:
        asked = 0
        while asked < 40:
            # A peer that answers one at a time sees how many were sent ahead.
            asked += sock.recv(1 << 16).count(b"\n")
            answered = len(most)
            most.extend(asked - step for step in range(answered, asked))
            sock.sendall(b"+PONG\r\n" * (asked - answered))
        sock.recv(1)

    run([Conversation(link_to(count), lines(40))], Deadline.after(20))
    assert max(most) <= WINDOW_STEPS


def test_requests_and_replies_larger_than_every_buffer_do_not_deadlock(link_to: Callable[..., Link]) -> None:
    n, size = 8, 8 << 20

    def echo(sock: socket.socket) -> None:
        while data := sock.recv(1 << 16):
            sock.sendall(data)

    blob = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    request = memoryview(b"$%d\r\n" % size + blob.tobytes() + b"\r\n")
    replies = [
        FixedSizeValuesReply(b"$%d\r\n" % size, size, b"$-1\r\n", np.zeros((1, size), np.uint8), np.zeros(1, dtype=bool)) for _ in range(n)
    ]
    run([Conversation(link_to(echo), [Step(request, reply) for reply in replies])], Deadline.after(60))
    assert all((reply.out[0] == blob).all() for reply in replies)


def test_a_stalled_node_is_named_and_the_others_are_not(link_to: Callable[..., Link]) -> None:
    good, stalled = link_to(answer_each, "good:1"), link_to(say(b"$4\r\nab"), "stalled:1")
    step, _ = values(1)
    with pytest.raises(DeadlineExceededError, match=r"within 0.2 s from node stalled:1$"):
        run([Conversation(good, lines(3)), Conversation(stalled, [step])], Deadline.after(0.2))


def test_a_deadline_that_has_passed_already_is_one(link_to: Callable[..., Link]) -> None:
    with pytest.raises(DeadlineExceededError, match="silent:1"):
        run([Conversation(link_to(say(), "silent:1"), lines(1))], Deadline.after(0))


def test_a_node_that_says_nothing_for_as_long_as_one_may_is_named_before_the_deadline(link_to: Callable[..., Link]) -> None:
    def slowly(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        for piece in (b"+P", b"ON", b"G\r", b"\n"):
            pause.wait(0.1)
            sock.sendall(piece)
        sock.recv(1)

    pause = threading.Event()
    deadline = Deadline.after(60, silent_s=0.3)
    run([Conversation(link_to(slowly), lines(1))], deadline)  # 0.4 s in all, and never silent for so long
    with pytest.raises(DeadlineExceededError, match=r"^no answer within 0.3 s from node silent:1$"):
        run([Conversation(link_to(answer_each), lines(1)), Conversation(link_to(say(), "silent:1"), lines(1))], deadline)
    assert deadline.remaining_s() > 30


def test_a_peer_that_never_reads_is_bounded_by_the_deadline(link_to: Callable[..., Link]) -> None:
    done = threading.Event()

    def deaf(sock: socket.socket) -> None:
        done.wait(30)

    link = link_to(deaf, "deaf:1")
    with pytest.raises(DeadlineExceededError, match="deaf:1"):
        run([Conversation(link, [Step(memoryview(bytes(64 << 20)), LineReply())])], Deadline.after(0.2))
    done.set()


@pytest.mark.parametrize("ending", [hang_up, lambda sock: sock.close()], ids=["reset", "closed"])
@pytest.mark.parametrize("before", [b"", b"$4\r\nab"])
def test_a_connection_that_ends_in_the_middle_names_the_node(link_to: Callable[..., Link], ending: Peer, before: bytes) -> None:
    def peer(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        sock.sendall(before)
        ending(sock)

    step, _ = values(1)
    with pytest.raises(NodeUnavailableError, match="node gone:1: "):
        run([Conversation(link_to(peer, "gone:1"), [step])], Deadline.after(20))


def test_bytes_that_nobody_asked_for_are_an_error_and_not_the_next_batchs_reply(link_to: Callable[..., Link]) -> None:
    with pytest.raises(ProtocolError, match=r"node chatty:1: sent more than was asked for: b'\+OK"):
        run([Conversation(link_to(say(b"+PONG\r\n+OK\r\n"), "chatty:1"), lines(1))], Deadline.after(20))


def test_an_idle_link_is_stale_once_something_arrives_or_it_ends(link_to: Callable[..., Link]) -> None:
    speak, ended = threading.Event(), threading.Event()

    def peer(sock: socket.socket) -> None:
        speak.wait(30)
        sock.sendall(b"+late\r\n")
        sock.recv(1)

    def end(sock: socket.socket) -> None:
        sock.close()
        ended.set()

    quiet, closed = link_to(peer), link_to(end)
    assert not quiet.stale
    speak.set()
    ended.wait(30)
    for link in (quiet, closed):
        link.sock.setblocking(True)
        link.sock.recv(1, socket.MSG_PEEK)  # wait until it has arrived
        link.sock.setblocking(False)
        assert link.stale


class Endless(ReplyReader):
    """A reply that takes any bytes and is never whole."""

    done = False

    def take(self, data: NDArray[np.uint8]) -> int:
        return len(data)


def test_a_node_that_sends_a_little_all_the_time_does_not_outlast_the_deadline(link_to: Callable[..., Link]) -> None:
    def trickle(sock: socket.socket) -> None:
        with suppress(OSError):
            while True:  # faster than the wait of any poll
                sock.sendall(b"+")

    step = Step(memoryview(b"PING\r\n"), Endless())
    with pytest.raises(DeadlineExceededError, match="peer:1"):
        run([Conversation(link_to(trickle), [step])], Deadline.after(0.1))


def test_a_reply_without_an_end_is_bounded_in_memory(link_to: Callable[..., Link], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvemb.net.link._MAX_BUFFER_BYTES", 1 << 20)
    reply = FixedSizeValuesReply(b"$9999999\r\n", 9999999, b"$-1\r\n", np.zeros((1, 9), np.uint8), np.zeros(1, dtype=bool))
    with pytest.raises(ProtocolError, match="does not end within"):
        run([Conversation(link_to(say(b"$9999999\r\n", bytes(4 << 20))), [Step(memoryview(b"GET"), reply)])], Deadline.after(20))


class Holding(Link):
    """Takes all that has arrived off the socket and hands it out a little at a time, as a connection that decrypts does."""

    def __init__(self, link: Link) -> None:
        super().__init__(link.sock, link.address)
        self._held = b""

    @property
    def pending(self) -> int:
        return len(self._held)

    def receive(self) -> int:
        with suppress(BlockingIOError):
            self._held += self.sock.recv(1 << 20)
        piece, self._held = self._held[:3], self._held[3:]
        assert self._end + len(piece) <= len(self._buffer)
        self._buffer[self._end : self._end + len(piece)] = np.frombuffer(piece, np.uint8)
        self._end += len(piece)
        return len(piece)


def test_bytes_that_a_connection_holds_back_are_read_though_no_poll_tells_of_them(link_to: Callable[..., Link]) -> None:
    step, reply = values(3)
    link = Holding(link_to(say(b"$4\r\nabcd\r\n$-1\r\n$4\r\nefgh\r\n")))
    run([Conversation(link, [step])], Deadline.after(60))
    assert reply.found.tolist() == [True, False, True]


def test_connecting_to_nobody_names_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(NodeUnavailableError, match=rf"node 127.0.0.1:{port}: cannot connect"):
        connect_link(f"127.0.0.1:{port}", Deadline.after(60))


# --- the pool -------------------------------------------------------------------------------------------------------------------


class Connections:
    """Makes links to a peer that answers, and keeps what happened."""

    def __init__(self, make: Callable[..., Link]) -> None:
        self._make = make
        self.made: list[Link] = []
        self.dropped: list[Link] = []
        self.pool = LinkPool(self._connect, self.dropped.append)

    def _connect(self, address: str, deadline: Deadline) -> Link:
        if address == "down:1":
            raise NodeUnavailableError("down:1")
        self.made.append(self._make(answer_each, address))
        return self.made[-1]


def test_links_are_used_again_after_a_batch_that_ended_well(link_to: Callable[..., Link]) -> None:
    net = Connections(link_to)
    for _ in range(3):
        with net.pool.lease(["a:1", "b:1"], Deadline.after(60)) as links:
            assert sorted(links) == ["a:1", "b:1"]
            run([Conversation(link, lines(2)) for link in links.values()], Deadline.after(20))
    assert (len(net.made), net.dropped) == (2, [])
    with net.pool.lease(["a:1"], Deadline.after(60)), net.pool.lease(["a:1"], Deadline.after(60)):
        assert len(net.made) == 3  # two at once never share a link
    net.pool.close()
    assert all(link.sock.fileno() == -1 for link in net.made)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, NodeUnavailableError])
def test_every_link_of_a_failed_batch_is_dropped(link_to: Callable[..., Link], error: type[BaseException]) -> None:
    net = Connections(link_to)

    def fail() -> None:
        with net.pool.lease(["a:1", "b:1"], Deadline.after(60)):
            raise error("x")

    with pytest.raises(error):
        fail()
    assert net.dropped == net.made
    assert all(link.sock.fileno() == -1 for link in net.made)
    with net.pool.lease(["a:1"], Deadline.after(60)) as links:
        assert links["a:1"] not in net.dropped


def test_links_made_before_one_that_failed_are_kept_because_nothing_was_sent_on_them(link_to: Callable[..., Link]) -> None:
    net = Connections(link_to)
    for _ in range(2):
        with pytest.raises(NodeUnavailableError), net.pool.lease(["a:1", "down:1"], Deadline.after(60)):
            pass
    with net.pool.lease(["a:1"], Deadline.after(60)) as links:
        run([Conversation(links["a:1"], lines(2))], Deadline.after(20))
    assert (len(net.made), net.dropped) == (1, [])
    net.pool.close()


def test_a_closed_pool_lends_nothing_and_takes_nothing_back(link_to: Callable[..., Link]) -> None:
    net = Connections(link_to)
    with net.pool.lease(["a:1"], Deadline.after(60)):
        net.pool.close()
    assert net.made[0].sock.fileno() == -1
    with pytest.raises(ClosedError), net.pool.lease(["a:1"], Deadline.after(60)):
        pass
