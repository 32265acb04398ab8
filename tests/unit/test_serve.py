# SPDX-License-Identifier: Apache-2.0
"""What ``tools/serve.py`` says before it starts a server; ``tests/connector/test_server.py`` runs
one."""

from __future__ import annotations

import random
import socket
import sys
from contextlib import suppress

import pytest
import serve


@pytest.fixture
def main(monkeypatch):
    """Runs the script for a port; it may neither build a model nor start a server."""

    def run(port):
        monkeypatch.setattr(sys, "argv", ["serve.py", "--port", str(port)])
        return serve.main()

    def is_late(*_, **__):
        raise AssertionError("it went on")

    monkeypatch.setattr(serve, "build_model", is_late)
    return run


def bind(server, address):
    """Bind to a port that nobody gets by chance once it is free again; return it."""
    while True:
        port = random.randrange(20_000, 30_000)
        with suppress(OSError):
            server.bind((address, port))
            return port


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "::"])  # noqa: S104
def test_a_port_of_somebody_elses_server_is_named_before_all_else(main, capsys, address):
    """Also of one that lets others listen beside it, as vLLM's own does."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        port = bind(other, address)
        other.listen()
        assert main(port) == 1
        (sentence,) = capsys.readouterr().err.splitlines()
        assert f"port {port} is in use" in sentence and f"PORT={port + 1}" in sentence
    assert not serve.is_taken(port)


def test_a_free_port_is_no_obstacle(main):
    with socket.socket() as found:
        port = bind(found, "localhost")
    with pytest.raises(AssertionError, match="it went on"):
        main(port)
