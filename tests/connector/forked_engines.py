# SPDX-License-Identifier: Apache-2.0
"""Engines' processes, forked from one that has imported vLLM: the import is most of a start.

That process has one thread and has started nothing, so that what is forked from it is as good as
new. The processes that vLLM itself starts import vLLM again.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from functools import cache
from typing import Any, NoReturn

import engine_child


class Forked:
    """What ``EngineChild`` uses of ``subprocess.Popen``. ``_status``: brings the process's id, then
    its exit code, and ends with it."""

    def __init__(self, *_: object, stderr: Any, env: dict[str, str], **how: object) -> None:
        status, its_status = os.pipe()
        its_stdin, stdin = os.pipe()
        stdout, its_stdout = os.pipe()
        _, requests = _server()
        socket.send_fds(requests, [json.dumps(env).encode()], [its_stdin, its_stdout, stderr.fileno(), its_status])
        for fd in (its_stdin, its_stdout, its_status):
            os.close(fd)
        self.stdin, self.stdout, self._status = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"), os.fdopen(status)
        self._code: int | None = None
        said = self._status.readline()
        assert said, "the process that forks is gone"
        self.pid = int(said)

    def poll(self) -> int | None:
        if self._code is None and select.select([self._status], [], [], 0)[0]:
            with self._status:
                self._code = int(self._status.read() or -signal.SIGKILL)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            select.select([self._status], [], [], timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("a forked engine", timeout or 0)
        return code


@cache
def _server() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the process that forks; it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            env=engine_child.environment("inproc", 1) | {"PYTHONPATH": os.pathsep.join(sys.path)},
            pass_fds=[theirs.fileno()],
        )
    return process, ours


def serve() -> None:
    """Be that process."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()
    importlib.import_module("vllm.entrypoints.llm")
    gc.freeze()  # a start collects garbage a dozen times, and what has been imported is none
    gc.unfreeze = lambda: None  # as an engine's end does, only to collect once more
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, fds, *_ = socket.recv_fds(requests, 1 << 20, 4)
        if not message:
            return
        if os.fork() == 0:
            requests.close()
            _be_engine(json.loads(message), *fds)
        for fd in fds:
            os.close(fd)


def _be_engine(env: dict[str, str], *fds: int) -> NoReturn:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *streams, status = fds
    for target, fd in enumerate(streams):
        os.dup2(fd, target)
        os.close(fd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [place for place in env.get("PYTHONPATH", "").split(os.pathsep) if place not in sys.path]
    os.write(status, f"{os.getpid()}\n".encode())
    code = 1
    try:
        engine_child.child_main()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os.write(status, str(code).encode())
    os._exit(code)


if __name__ == "__main__":
    serve()
