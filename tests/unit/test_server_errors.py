"""What each error line of a server means. The lines are those of memcached 1.6, Redis 7 and 8, and Valkey 8 and 9, from their sources."""

import pytest

from kvemb.errors import KvembError, NodeFullError, NodeRefusesError, NodeUnavailableError, ProtocolError, RecordError
from kvemb.stores.server_errors import server_error

LINES = {
    NodeUnavailableError: [
        "-LOADING Redis is loading the dataset in memory",
        "-MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "-READONLY You can't write against a read only replica.",
        "-CLUSTERDOWN Hash slot not served",
        "-CLUSTERDOWN The cluster is down and only accepts read commands",
        "-TRYAGAIN Multiple keys request during rehashing of slot",
        "-BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
        "-BUSY Valkey is busy running a module command.",
        "-MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.",
        "-MISCONF Errors writing to the AOF file: No space left on device",
        "-NOREPLICAS Not enough good replicas to write.",
        "-ERR max number of clients reached",
        "-ERR max number of clients + cluster connections reached",
        "-UNBLOCKED client unblocked via CLIENT UNBLOCK",
        "ERROR Too many open connections",
        "SERVER_ERROR out of memory",
        "SERVER_ERROR out of memory reading request",
        "SERVER_ERROR out of memory writing get response",
        "SERVER_ERROR out of memory writing stats",
        "SERVER_ERROR Out of memory during read",
        "SERVER_ERROR Out of memory generating stats",
        "SERVER_ERROR Out of memory preparing to send stats",
        "SERVER_ERROR no memory to read from flash",
        "SERVER_ERROR refcount overflow during fetch",
        "SERVER_ERROR backend failure",
    ],
    NodeFullError: [
        "-OOM command not allowed when used memory > 'maxmemory'.",
        "-OOM allow-oom flag is not set on the script, can not run it when used memory > 'maxmemory'",
        "SERVER_ERROR out of memory storing object",
        "SERVER_ERROR Out of memory allocating item",
        "SERVER_ERROR Out of memory allocating new item",
        "SERVER_ERROR object too large for cache",
    ],
    NodeRefusesError: [
        "-NOAUTH Authentication required.",
        "-WRONGPASS invalid username-password pair or user is disabled.",
        "-NOPERM User kvemb has no permissions to run the 'eval' command",
        "-DENIED Redis is running in protected mode because protected mode is enabled",
        "-ERR AUTH <password> called without any password configured for the default user.",
        "-ERR Protocol error: unauthenticated bulk length",
        "-ERR unknown command 'EVAL', with args beginning with: 'return 1'",
        "-ERR unknown subcommand 'KILL'. Try CLIENT HELP.",
        "CLIENT_ERROR unauthenticated",
        "CLIENT_ERROR authentication failure",
    ],
    RecordError: ["-WRONGTYPE Operation against a key holding the wrong kind of value"],
    ProtocolError: [
        "ERROR",
        "CLIENT_ERROR bad command line format",
        "CLIENT_ERROR bad data chunk",
        "CLIENT_ERROR invalid flag",
        "-MOVED 3999 127.0.0.1:6381",
        "-CROSSSLOT Keys in request don't hash to the same slot",
        "-NOPROTO unsupported protocol version",
        "-EXECABORT Transaction discarded because of previous errors.",
        "-ERR syntax error",
        "-ERR Protocol error: invalid bulk length",
        "-ERR string exceeds maximum allowed size (proto-max-bulk-len)",
    ],
}


@pytest.mark.parametrize(("kind", "line"), [(kind, line) for kind, lines in LINES.items() for line in lines])
def test_each_line_of_a_server_is_waited_for_or_refused_or_ends_it(kind: type[KvembError], line: str) -> None:
    error = server_error("10.0.0.1:6379", line.encode())
    assert type(error) is kind, error
    assert "10.0.0.1:6379" in str(error)
