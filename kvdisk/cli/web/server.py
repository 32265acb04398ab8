# SPDX-License-Identifier: Apache-2.0
"""The server: Python's own, with bounds on what it lacks: how many requests at a time, how long and
how much each may take.

One request a connection. Routes: ``/`` (the page), ``/figures.json`` (the last look), ``/report``,
and ``/why``, which is a POST only because a prompt is too long for an address: nothing changes
anything.
"""

from __future__ import annotations

import io
import json
import socket
import sys
import threading
import time
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

from kvdisk.cli.output import as_json_text, printable
from kvdisk.cli.web.guard import Guard, Headers, policy, split
from kvdisk.cli.web.page import document, report_headers
from kvdisk.cli.web.questions import Answered, Asker
from kvdisk.cli.web.watch import SPANS, Seen, Watcher

MOST_REQUESTS = 16
"""Requests that are answered at a time; further ones are refused at once."""
HEAD_S, BODY_S, ANSWER_S = 10.0, 60.0, 60.0
"""How long a request's head, its body, and the sending of the answer may take."""
HEAD_BYTES, BODY_BYTES = 32 << 10, 16 << 20
"""How long a request's head and its body may be: a million tokens are 8 MB."""
MOST_DIGITS = 20
"""Of a number in an address: Python reads none of 4,301."""
_JSON, _HTML, _TEXT = "application/json", "text/html; charset=utf-8", "text/plain; charset=utf-8"
_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 5\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class _Arriving(io.RawIOBase):
    """What comes over a connection, until ``may_take`` is over."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._end_s, self._left_bytes = 0.0, 0

    def may_take(self, seconds: float, length_bytes: int) -> None:
        """Let so much come, in so long from now."""
        self._end_s, self._left_bytes = time.monotonic() + seconds, length_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """See ``io.RawIOBase``. Raises TimeoutError, and ConnectionAbortedError where more comes
        than may: an end would be taken for the request's own."""
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        if self._left_bytes <= 0:
            raise ConnectionAbortedError
        self._connection.settimeout(left_s)
        count = self._connection.recv_into(memoryview(buffer)[: self._left_bytes])
        self._left_bytes -= count
        return count


class WebServer(ThreadingHTTPServer):
    """Answers at ``address`` until the process ends. Raises OSError where that cannot be had."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = MOST_REQUESTS

    def __init__(
        self, address: tuple[str, int], family: socket.AddressFamily, watcher: Watcher, asker: Asker, guard: Guard
    ) -> None:
        self.address_family = family
        self.watcher, self.asker, self.guard = watcher, asker, guard
        self.document = document()
        self._free = threading.BoundedSemaphore(MOST_REQUESTS)
        self._encoded: tuple[int, bytes] = (-1, b"")
        super().__init__(address, _Handler)

    def figures(self, span: str, after: int) -> bytes:
        """Return the last look as JSON, with the points of a chart that are newer than
        ``after``."""
        seen = self.watcher.seen()
        more = {
            "now_s": round(time.time(), 3),
            "began_s": self.watcher.began_s,
            "interval_s": self.watcher.interval_s,
            "number": seen.number,
            "problem": seen.problem,
            "departed_per_s": seen.departed_per_s,
            "points": self.watcher.history.points(span, after),
        }
        return b"".join((b'{"frame": ', self._encode(seen), b", ", json.dumps(more)[1:].encode()))

    def _encode(self, seen: Seen) -> bytes:
        """Return the frame as JSON, made once for all who ask."""
        number, text = self._encoded
        if number != seen.number:
            text = as_json_text(seen.frame).encode()
            self._encoded = seen.number, text
        return text

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread of its own, or refuse where there are enough."""
        if not self._free.acquire(blocking=False):
            request.setblocking(False)
            try:
                request.send(_BUSY)
            finally:
                self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """See ``socketserver.ThreadingMixIn``."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, *_: Any) -> None:
        """Say what went wrong with a request, unless the other end is gone or too slow."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | TimeoutError | BlockingIOError):
            said = printable(f"{type(error).__name__}: {error}")
            print(f"kvdisk: a request failed ({said})", file=sys.stderr, flush=True)


class _Handler(BaseHTTPRequestHandler):
    """One request. Its thread ends with it."""

    server: WebServer
    server_version, sys_version = "kvdisk", ""

    def setup(self) -> None:
        super().setup()
        self._arriving = _Arriving(self.connection)
        self._arriving.may_take(HEAD_S, HEAD_BYTES)
        self.rfile = io.BufferedReader(self._arriving)

    def do_GET(self) -> None:
        """Show the page, the last look, or a report."""
        url = split(self.path)
        if not self._may(navigates=url.path == "/"):
            return
        if url.path == "/":
            self._send(HTTPStatus.OK, _HTML, self.server.document.body, self.server.document.headers)
        elif url.path == "/figures.json":
            asked = {name: values[-1] for name, values in parse_qs(url.query).items()}
            span, after = asked.get("span", "minutes"), asked.get("after", "-1")
            if span not in SPANS or not after.removeprefix("-").isdecimal() or len(after) > MOST_DIGITS:
                self._say(HTTPStatus.BAD_REQUEST, f"span is one of {', '.join(SPANS)}, and after a number.")
                return
            self._send(HTTPStatus.OK, _JSON, self.server.figures(span, int(after)))
        elif url.path == "/report":
            self._send_answer(self.server.asker.ask({"what": "report"}), _HTML, report_headers())
        else:
            self._say(HTTPStatus.NOT_FOUND, "There is no such page.")

    def do_POST(self) -> None:
        """Say how far a prompt would hit."""
        if not self._may(navigates=False):
            return
        if split(self.path).path != "/why":
            self._say(HTTPStatus.NOT_FOUND, "There is no such question.")
        elif (question := self._question()) is not None:
            self._send_answer(self.server.asker.ask({"what": "why"} | question), _JSON)

    def _may(self, *, navigates: bool) -> bool:
        """Return whether the request is answered; say why where it is not."""
        said = {name: self.headers.get(name, "") for name in _SAID}
        headers = Headers(self.headers.get_all("Host") or [], **{_SAID[name]: value for name, value in said.items()})
        refusal = self.server.guard.refuses(headers, navigates=navigates)
        if refusal is not None:
            wants = {"WWW-Authenticate": 'Basic realm="kvdisk", charset="UTF-8"'} if refusal.status == 401 else {}
            self._say(HTTPStatus(refusal.status), refusal.why, wants)
        return refusal is None

    def _question(self) -> dict[str, str] | None:
        """Return what is asked of a prompt; None where that is not one, and it was said."""
        length = self.headers.get("Content-Length", "")
        if self.headers.get_content_type() != _JSON:  # another site's page cannot send that
            self._say(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"A question is {_JSON}.")
        elif not length.isdecimal() or "Transfer-Encoding" in self.headers:
            self._say(HTTPStatus.LENGTH_REQUIRED, "A question says its length.")
        elif len(length) > 9 or int(length) > BODY_BYTES:
            self._say(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"A question has {BODY_BYTES >> 20} MiB at most.")
        else:
            self._arriving.may_take(BODY_S, int(length))
            question = _parsed(self.rfile.read(int(length)))
            if question is not None:
                return question
            self._say(HTTPStatus.BAD_REQUEST, "A question is an object with the texts tokens, namespace and salt.")
        return None

    def _send_answer(self, answered: Answered, kind: str, headers: Mapping[str, str] | None = None) -> None:
        if answered.is_busy:
            self._say(HTTPStatus.SERVICE_UNAVAILABLE, answered.problem, {"Retry-After": "5"})
        elif answered.problem:
            self._say(HTTPStatus.UNPROCESSABLE_ENTITY, answered.problem)
        else:
            self._send(HTTPStatus.OK, kind, answered.text.encode(), headers)

    def _say(self, status: HTTPStatus, sentence: str, headers: Mapping[str, str] | None = None) -> None:
        self._send(status, _TEXT, sentence.encode(), {**policy(), **(headers or {})})

    def _send(self, status: HTTPStatus, kind: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.connection.settimeout(ANSWER_S)
        self.send_response(status)
        for name, value in (headers or policy()).items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, *_: object, **__: object) -> None:
        """See ``BaseHTTPRequestHandler``: what is no request, or of no known method."""
        self.close_connection = True
        self.command = self.command if getattr(self, "command", None) else "GET"
        self._say(HTTPStatus(code), f"{HTTPStatus(code).phrase}.")

    def log_message(self, *_: object) -> None:
        """Log nothing: whoever looks is no event."""


_SAID = {"Authorization": "authorization", "Origin": "origin", "Sec-Fetch-Site": "site", "Sec-Fetch-Mode": "mode"}


def _parsed(body: bytes) -> dict[str, str] | None:
    try:
        question = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(question, dict):
        return None
    found = {name: question.get(name, "") for name in ("tokens", "namespace", "salt")}
    return found if all(isinstance(value, str) for value in found.values()) else None
