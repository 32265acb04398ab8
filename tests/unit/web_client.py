# SPDX-License-Identifier: Apache-2.0
"""``kvdisk web`` in this process, asked over HTTP, for the tests of ``kvdisk.cli.web``."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPMessage
from pathlib import Path
from typing import Any, NamedTuple

from kvdisk.cli.web.guard import Guard
from kvdisk.cli.web.questions import Asker
from kvdisk.cli.web.server import WebServer
from kvdisk.cli.web.watch import Watcher


class Answer(NamedTuple):
    status: int
    headers: HTTPMessage
    text: str

    def json(self) -> Any:
        assert self.status == 200, self.text
        return json.loads(self.text)


class Web:
    """A server and who asks it. ``watcher``: looks when told to."""

    def __init__(self, server: WebServer, watcher: Watcher, asker: Asker) -> None:
        self.server, self.watcher, self.asker = server, watcher, asker
        self.port = int(server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def ask(self, path: str = "/", method: str = "GET", body: str | None = None, **headers: str) -> Answer:
        """``headers``: with _ for -; Host only where it is not the right one."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            return Answer(answer.status, answer.headers, answer.read().decode())
        finally:
            connection.close()

    def figures(self, query: str = "") -> dict[str, Any]:
        """Look, and return what is told of it."""
        self.watcher.look()
        found: dict[str, Any] = self.ask(f"/figures.json{query}").json()
        return found

    def why(self, tokens: object, namespace: str = "", salt: str = "", **headers: str) -> Answer:
        text = tokens if isinstance(tokens, str) else json.dumps(tokens)
        body = json.dumps({"tokens": text, "namespace": namespace, "salt": salt})
        return self.ask("/why", "POST", body, **({"Content_Type": "application/json"} | headers))

    def raw(self, sent: bytes) -> bytes:
        """Send bytes, and return all that comes back."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(sent)
            found = b""
            try:
                while more := connection.recv(1 << 16):
                    found += more
            except ConnectionError:
                pass
            return found


@contextmanager
def serving(
    directories: Sequence[Path], *, watch: bool = False, token: str | None = None, port: int = 0, **how: Any
) -> Iterator[Web]:
    """Serve a store. ``watch``: look by itself, each 0.2 s. ``how``: of ``Watcher``."""
    watcher, asker = Watcher(list(directories), 0.2, **how), Asker(list(directories))
    guard = Guard([], any_address=False, token=token)
    server = WebServer(("127.0.0.1", port), socket.AF_INET, watcher, asker, guard)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    if watch:
        watcher.start()
    try:
        yield Web(server, watcher, asker)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
