"""Reads one command as a Redis server does, strictly."""


def first_command(request: bytes) -> tuple[list[bytes], bytes]:
    """Return the words of the first command of a request, and what follows it."""
    line, _, request = request.partition(b"\r\n")
    assert line == b"*%d" % int(line[1:]), "Redis refuses leading zeros"
    words = []
    for _ in range(int(line[1:])):
        size, _, request = request.partition(b"\r\n")
        words.append(request[: int(size[1:])])
        assert request[int(size[1:]) : int(size[1:]) + 2] == b"\r\n"
        request = request[int(size[1:]) + 2 :]
    return words, request
