# SPDX-License-Identifier: Apache-2.0
"""No process has a web server, a codec or a client of a remote store that nobody asked for."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

WATCHED = ("http.server", "socketserver", "zstandard", "obstore", "mooncake", "kvdisk.cli.web.server")
ENGINE = """
from kvdisk.config import Config
from kvdisk.remote.client import open_remote
import kvdisk.assembly, kvdisk.environment, kvdisk.mover_process, kvdisk.shared_store, kvdisk.index.child_main
import kvdisk.worker.mover
"""
REMOTE = ENGINE + "open_remote(Config(remote='s3://bucket/kv'{})).close()\n"
TOOLS = "from kvdisk.cli import main\nfor name in main.MODULES: main.Commands().get_command(None, name)\n"
CASES = {
    "an engine's parts": (ENGINE, set()),
    "a remote store": (REMOTE.format(""), {"obstore"}),
    "a remote store with the codec": (REMOTE.format(", remote_codec='zstd-planes'"), {"obstore", "zstandard"}),
    "any command": (TOOLS, set()),
    "kvdisk web": (TOOLS + "import kvdisk.cli.web.server\n", {"http.server", "socketserver", "kvdisk.cli.web.server"}),
}


@pytest.mark.parametrize("case", CASES)
def test_only_what_was_asked_for_is_imported(case):
    code, wanted = CASES[case]
    said = f"{code}import json, sys\nprint(json.dumps([name for name in {WATCHED} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) == wanted
