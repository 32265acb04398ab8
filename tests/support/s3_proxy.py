# SPDX-License-Identifier: Apache-2.0
"""A proxy before an S3 server that fails what it is told to fail, as one in a data centre may."""

from __future__ import annotations

import threading
from contextlib import suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

MOST_BYTES = 256 << 20


class S3Proxy:
    """Passes requests on to ``address``. ``failing``: methods that it answers with 503 instead;
    ``said``: with an error of that code and status. ``untrue``: what it says in the place of what,
    in the bodies of answers. ``endless``: bodies go on, up to MOST_BYTES; ``sent_bytes``: of these.
    """

    def __init__(self, address: str = "") -> None:
        self.failing: set[str] = set()
        self.said: tuple[int, str] = (503, "ServiceUnavailable")
        self.untrue: tuple[bytes, bytes] | None = None
        self.endless, self.sent_bytes = False, 0
        target, proxy = urlsplit(address).netloc, self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.command in proxy.failing:
                    status, code = proxy.said
                    found = f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode()
                    self._answer(status, {}, found)
                    return
                connection = HTTPConnection(target)
                try:
                    connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                    for name, value in self.headers.items():
                        connection.putheader(name, value)
                    connection.endheaders(body)
                    response = connection.getresponse()
                    found = response.read()
                    if proxy.untrue is not None:
                        found = found.replace(*proxy.untrue)
                    self._answer(response.status, dict(response.getheaders()), found)
                except OSError:
                    self.close_connection = True
                finally:
                    connection.close()

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any  # noqa: N815 - names of the library

            def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    if name.lower() not in {"content-length", "transfer-encoding", "connection", "date", "server"}:
                        self.send_header(name, value)
                length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(body))
                self.send_header("Content-Length", length)
                if proxy.endless and self.command == "GET":
                    self._go_on(body)
                    return
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def _go_on(self, body: bytes) -> None:
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.close_connection = True
                with suppress(OSError):
                    while proxy.sent_bytes < MOST_BYTES:
                        self.wfile.write(b"%x\r\n%b\r\n" % (len(body), body))
                        proxy.sent_bytes += len(body)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        """Take no more requests."""
        self._server.shutdown()
        self._server.server_close()
