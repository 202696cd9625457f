"""A WebHDFS double: a name node that redirects and a data node that keeps bytes, by the protocol's own words, and their ways to fail.

https://hadoop.apache.org/docs/stable/hadoop-project-dist/hadoop-hdfs/WebHDFS.html. Only what clients of checkpoints ask for.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

PREFIX = "/webhdfs/v1"


class Hdfs:
    """What both nodes share: files and folders by path; and how they fail.

    Attributes:
        safe_mode: the name node refuses every change.
        refuses_append: as a cluster with dfs.support.append off.
        drops_writes, drops_reads: so many of the next ones break off in the middle, as a data node that dies.
        read_errors: so many of the next reads are answered by an error of the data node.
        refuses_renames: so many of the next ones are answered by `false`, status 200, as for a target that exists.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.folders: set[str] = {"/"}
        self.safe_mode = self.refuses_append = False
        self.drops_writes = self.drops_reads = self.read_errors = self.refuses_renames = 0
        self.operations: list[str] = []
        self.lock = threading.Lock()

    def make_folders(self, path: str) -> None:
        self.folders |= {path, *map(str, PurePosixPath(path).parents)}

    def status(self, path: str, suffix: str) -> dict[str, object]:
        if path in self.files:
            return {"pathSuffix": suffix, "type": "FILE", "length": len(self.files[path]), "modificationTime": 0}
        return {"pathSuffix": suffix, "type": "DIRECTORY", "length": 0, "modificationTime": 0}

    def children(self, path: str) -> list[str]:
        return sorted(one for one in {*self.files, *self.folders} if one != path and str(PurePosixPath(one).parent) == path)


class _Node(BaseHTTPRequestHandler):
    hdfs: Hdfs
    data_port: int
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _asked(self) -> tuple[str, str, dict[str, str]]:
        url = urlsplit(self.path)
        words = {name: values[0] for name, values in parse_qs(url.query).items()}
        path = unquote(url.path).removeprefix(PREFIX).rstrip("/") or "/"
        return words["op"].upper(), path, words

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            raise AssertionError("not used by clients of checkpoints")
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _say(self, what: object) -> None:
        self._answer(200, json.dumps(what).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, exception: str, message: str) -> None:
        told = {"RemoteException": {"exception": exception, "javaClassName": f"org.apache.hadoop.{exception}", "message": message}}
        self._answer(status, json.dumps(told).encode(), {"Content-Type": "application/json"})

    def do_GET(self) -> None:
        self._do()

    def do_PUT(self) -> None:
        self._do()

    def do_POST(self) -> None:
        self._do()

    def do_DELETE(self) -> None:
        self._do()

    def _do(self) -> None:
        raise NotImplementedError


class _NameNode(_Node):
    def _do(self) -> None:
        hdfs, body = self.hdfs, self._body()
        assert not body, "bytes go to the data node"
        op, path, words = self._asked()
        with hdfs.lock:
            hdfs.operations.append(op)
            if op in ("MKDIRS", "CREATE", "APPEND", "RENAME", "DELETE") and hdfs.safe_mode:
                return self._refuse(403, "SafeModeException", f"Cannot {op.lower()} {path}. Name node is in safe mode.")
            if op in ("GETFILESTATUS", "LISTSTATUS", "OPEN", "APPEND") and path not in hdfs.files and path not in hdfs.folders:
                return self._refuse(404, "FileNotFoundException", f"File does not exist: {path}")
            if op == "APPEND" and hdfs.refuses_append:
                return self._refuse(400, "UnsupportedOperationException", "Append is not supported")
            if op in ("OPEN", "CREATE", "APPEND"):
                query = "&".join(f"{name}={value}" for name, value in words.items())
                return self._answer(307, b"", {"Location": f"http://127.0.0.1:{self.data_port}{PREFIX}{path}?{query}"})
            if op == "GETFILESTATUS":
                return self._say({"FileStatus": hdfs.status(path, "")})
            if op == "LISTSTATUS":
                found = [path] if path in hdfs.files else hdfs.children(path)
                return self._say({"FileStatuses": {"FileStatus": [hdfs.status(one, PurePosixPath(one).name) for one in found]}})
            if op == "MKDIRS":
                hdfs.make_folders(path)
                return self._say({"boolean": True})
            if op == "RENAME":
                target = words["destination"]
                fails = path not in hdfs.files or target in hdfs.files or hdfs.refuses_renames > 0
                hdfs.refuses_renames = max(0, hdfs.refuses_renames - 1)
                if not fails:
                    hdfs.files[target] = hdfs.files.pop(path)
                return self._say({"boolean": not fails})
            if op == "DELETE":
                if path in hdfs.folders and hdfs.children(path) and words.get("recursive") != "true":
                    return self._refuse(403, "PathIsNotEmptyDirectoryException", f"{path} is non empty")
                there = path in hdfs.folders or path in hdfs.files
                hdfs.files = {name: data for name, data in hdfs.files.items() if name != path and not name.startswith(path + "/")}
                hdfs.folders = {name for name in hdfs.folders if name != path and not name.startswith(path + "/")}
                return self._say({"boolean": there})
            return self._refuse(400, "IllegalArgumentException", f"Invalid value for webhdfs parameter op: {op}")


class _DataNode(_Node):
    def _do(self) -> None:
        hdfs, body = self.hdfs, self._body()
        op, path, words = self._asked()
        with hdfs.lock:
            if op == "APPEND" and hdfs.drops_writes:
                hdfs.drops_writes -= 1
                hdfs.files[path] = hdfs.files[path] + body[: len(body) // 2]
                return self._break_off()
            if op in ("CREATE", "APPEND"):
                before = b"" if op == "CREATE" else hdfs.files[path]
                hdfs.make_folders(str(PurePosixPath(path).parent))
                hdfs.files[path] = before + body
                return self._answer(201 if op == "CREATE" else 200)
            assert op == "OPEN"
            if hdfs.read_errors:
                hdfs.read_errors -= 1
                return self._refuse(500, "IOException", "Could not obtain block: all replicas are on dead nodes")
            start, n = int(words.get("offset", 0)), int(words.get("length", -1))
            data = hdfs.files[path][start:] if n < 0 else hdfs.files[path][start : start + n]
            if hdfs.drops_reads:
                hdfs.drops_reads -= 1
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data[: len(data) // 2])
                return self._break_off()
            return self._answer(200, data, {"Content-Type": "application/octet-stream"})

    def _break_off(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        self.connection.close()


@contextmanager
def webhdfs() -> Iterator[tuple[Hdfs, int]]:
    """Start a name node and a data node on loopback; yields what they share, and the name node's port."""
    hdfs = Hdfs()
    servers: list[ThreadingHTTPServer] = []

    def start(node: type[_Node], **fields: Any) -> int:
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), type(node.__name__, (node,), {"hdfs": hdfs, **fields})))
        threading.Thread(target=servers[-1].serve_forever, name=node.__name__, daemon=True).start()
        return int(servers[-1].server_address[1])

    try:
        yield hdfs, start(_NameNode, data_port=start(_DataNode))
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
