# SPDX-License-Identifier: Apache-2.0
"""A real Mooncake Store of this machine, from its package: a master and one node, each a process.

Mooncake's nodes and clients listen on every address of the machine, whatever they are told.
"""

from __future__ import annotations

import base64
import json
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from support.s3_server import START_S, free_ports
from support.waits import stop

NODE = """
import base64, json, sys
from mooncake.store import MooncakeDistributedStore
master, node_bytes = sys.argv[1:]
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(node_bytes), 64 << 20, "tcp", "", master)
assert code == 0, code
print("ready", flush=True)
for line in sys.stdin:
    asked, answer = json.loads(line), None
    if asked["do"] == "write":
        answer = store.upsert(asked["name"], base64.b64decode(asked["body"]))
    elif asked["do"] == "remove":
        answer = store.remove(asked["name"], True)
    else:
        answer = base64.b64encode(store.get(asked["name"])).decode()
    print(json.dumps(answer), flush=True)
"""


class MooncakeStore:
    """The master, and a node with ``node_bytes`` of memory, through which tests also write and read
    behind a client's back."""

    def __init__(self, directory: Path, node_bytes: int = 256 << 20) -> None:
        self._directory = directory
        self._node_bytes = node_bytes
        self._port, self._metrics_port = free_ports(2)
        self._master: subprocess.Popen[bytes] | None = None
        self._node: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        """The master's address, as ``remote`` names it."""
        return f"mooncake://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start both, and wait until they work."""
        self.start_master()
        self.start_node()

    def start_master(self) -> None:
        """Start a master that knows of nothing, and wait until it listens."""
        spec = find_spec("mooncake")
        assert spec is not None and spec.origin is not None, "requirements/dev.txt names what has mooncake"
        command = [str(Path(spec.origin).parent / "mooncake_master"), "--rpc_address=127.0.0.1", "--logtostderr"]
        command += [f"--rpc_port={self._port}", "--metrics_host=127.0.0.1", f"--metrics_port={self._metrics_port}"]
        with self._log().open("ab") as log:
            self._master = subprocess.Popen(command, stdout=log, stderr=log)
        end_s = time.monotonic() + START_S
        while True:
            assert self._master.poll() is None and time.monotonic() < end_s, self._log().read_text()[-4000:]
            with suppress(OSError), socket.create_connection(("127.0.0.1", self._port)):
                return
            time.sleep(0.05)

    def start_node(self) -> None:
        """Start a node without objects, and wait until the master has it."""
        command = [sys.executable, "-c", NODE, f"127.0.0.1:{self._port}", str(self._node_bytes)]
        with self._log().open("ab") as log:
            self._node = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self._node.stdout is not None
        assert self._node.stdout.readline() == "ready\n", self._log().read_text()[-4000:]

    def write(self, name: str, body: bytes) -> None:
        """Have an object there with this content; an empty one it cannot hold."""
        assert self._ask(do="write", name=name, body=base64.b64encode(body).decode()) == 0

    def remove(self, name: str) -> None:
        """Remove an object, though it was just read."""
        assert self._ask(do="remove", name=name) == 0

    def read(self, name: str) -> bytes:
        """Return an object's content."""
        return base64.b64decode(str(self._ask(do="read", name=name)))

    def _ask(self, **asked: str) -> object:
        assert self._node is not None and self._node.stdin is not None and self._node.stdout is not None
        self._node.stdin.write(json.dumps(asked) + "\n")
        self._node.stdin.flush()
        return json.loads(self._node.stdout.readline())

    def hold_node(self) -> None:
        """Stop the node as a machine that hangs does, and wait until each of its threads has."""
        assert self._node is not None
        stop(self._node.pid)

    def resume_node(self) -> None:
        """Let it go on after ``hold_node``."""
        assert self._node is not None
        self._node.send_signal(signal.SIGCONT)

    def kill_node(self) -> None:
        """Kill the node. The master learns of it some seconds later."""
        _kill(self._node)
        self._node = None

    def kill_master(self) -> None:
        """Kill the master."""
        _kill(self._master)
        self._master = None

    def kill(self) -> None:
        """Kill both."""
        self.kill_node()
        self.kill_master()

    def _log(self) -> Path:
        return self._directory / "log"


def _kill(process: subprocess.Popen[bytes] | subprocess.Popen[str] | None) -> None:
    if process is not None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
