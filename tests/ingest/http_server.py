"""An HTTP server for tests whose answers fail on purpose."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

CONTENT = b"".join(b"line %d of the text\n" % number for number in range(400_000))


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """The address of a server in a thread of this process. It answers by the path:

    /status/N           status N
    /ranges/...         CONTENT, or a part of it; each first request for bytes from a position breaks after 3,000,000 of them
    /whole/...          CONTENT only as a whole; the connection breaks after 3,000,000 bytes
    /changes/...        like /ranges, with another ETag for parts
    /plain/...          CONTENT
    /chunked/...        CONTENT without its length
    /private/...        CONTENT for user "me" with password "secret" or with ?key=secret, else status 403
    """
    with _Server(("127.0.0.1", 0), _Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that closes its connection early is no error."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    BREAKS = 3_000_000

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        kind = self.path.split("/")[1]
        if kind == "status":
            return self._empty(int(self.path.split("/")[2]))
        if kind == "private" and "bWU6c2VjcmV0" not in self.headers.get("Authorization", "") and "key=secret" not in self.path:
            return self._empty(403)  # bWU6c2VjcmV0 is me:secret in base64
        if kind == "chunked":
            return self._chunked()
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(asked[1]) if asked and kind in ("ranges", "changes") else 0
        self.send_response(206 if start else 200)
        self.send_header("ETag", '"2"' if start and kind == "changes" else '"1"')
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        if self.command == "GET":
            stop = start + self.BREAKS if kind in ("ranges", "changes", "whole") else len(CONTENT)
            self.wfile.write(CONTENT[start:stop])
            self.close_connection = stop < len(CONTENT)

    def _empty(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _chunked(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(CONTENT), CONTENT))

    def log_message(self, format: str, *args: object) -> None:
        pass
