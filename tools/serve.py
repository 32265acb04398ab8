# SPDX-License-Identifier: Apache-2.0
"""vLLM's own OpenAI server with kvdisk, on a local model, until it is stopped.

When it answers, two lines to type are printed: the second one's answer says how many tokens of the
prompt kvdisk loaded. vLLM's own prefix cache is off for that. ``make serve`` runs it.
"""

from __future__ import annotations

import argparse
import errno
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from demo import ROOT, STORE, WORK, DemoError, build_model
from engine_child import CONNECTOR, CPU, START_S, environment, vllm_device

NAME = "demo"
REQUEST = WORK / "request.json"
PROMPT_LETTERS = 8000


def server_command(options: argparse.Namespace, model: Path) -> list[str]:
    """Return the command of the server."""
    settings = {
        "store_dirs": str(options.store),
        "nvme_bytes": options.nvme_bytes,
        "cpu_bytes": options.cpu_bytes,
        "min_load_tokens": 0,
        "log_requests": True,
        **json.loads(options.settings),
    }
    transfer = {"kv_connector": CONNECTOR, "kv_role": "kv_both", "kv_connector_extra_config": settings}
    return [
        *(sys.executable, "-W", "ignore::DeprecationWarning", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", NAME, "--port", str(options.port)),
        *(("--dtype", "float32", "--block-size", "32", "--enforce-eager") if vllm_device() == CPU else ()),
        "--no-enable-prefix-caching",
        *("--shutdown-timeout", "30"),  # vLLM kills an engine at once without, before it has ended in order
        *("--data-parallel-size", str(options.data_parallel_size)),
        *("--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer)),
    ]


def write_request() -> None:
    """Write the request of the two lines: a prompt of some hundred tokens and more."""
    prompt = (ROOT / "LICENSE").read_text()[:PROMPT_LETTERS]
    REQUEST.write_text(json.dumps({"model": NAME, "prompt": prompt, "max_tokens": 16, "temperature": 0}))


def is_taken(port: int) -> bool:
    """Whether somebody listens on a port of this machine, by any of its names. vLLM would listen
    beside a server that shares its port, and whoever asks may reach the other one."""
    for family, any_address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104
        try:
            with socket.socket(family) as own:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that has just ended is gone
                if family == socket.AF_INET6:
                    own.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                own.bind((any_address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return True
    return False


def await_health(server: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until the server answers; return whether it does, and has not ended."""
    end_s = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < end_s:
        try:
            with urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    return False


def say_what_to_type(port: int) -> None:
    """Print the two lines."""
    request = REQUEST.relative_to(Path.cwd()) if REQUEST.is_relative_to(Path.cwd()) else REQUEST
    ask = f"curl -s localhost:{port}/v1/completions -H 'Content-Type: application/json' -d @{request}"
    print("\nkvdisk: the server answers. Type this in another terminal, twice; the second shows the hit:\n")
    for which in ("first", "second"):
        print(f"  {ask} | grep -o '\"cached_tokens\":[0-9]*'   # {which}")
    print("\nkvdisk: Ctrl-C ends it; started again, the first one hits too, from NVMe.", flush=True)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a local model directory; without it a random one is built")
    parser.add_argument("--store", type=Path, default=STORE, help="where the store lies")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--nvme-bytes", default="4GiB", help="cap of the store")
    parser.add_argument("--cpu-bytes", default="1GiB", help="host memory of the CPU tier")
    parser.add_argument("--data-parallel-size", type=int, default=1, help="engines, as vLLM's option of this name")
    parser.add_argument("--settings", default="{}", metavar="JSON", help="more of kvdisk's settings")
    options = parser.parse_args()
    options.store = options.store.absolute()
    return options


def main() -> int:
    """Start the server and stay with it; return its exit code, 0 where it was told to stop."""
    options = parse_options()
    if is_taken(options.port):
        sentence = "port {0} is in use: name another one, as make serve PORT={1} or with --port {1}."
        print(f"kvdisk: {sentence.format(options.port, options.port + 1)}", file=sys.stderr)
        return 1
    WORK.mkdir(exist_ok=True)
    try:
        model = build_model() if options.model is None else options.model.absolute()
    except DemoError as failure:
        print(f"kvdisk: {failure}", file=sys.stderr)
        return 1
    write_request()
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True
        server.terminate()

    with subprocess.Popen(server_command(options, model), env=environment("own", 1)) as server:
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        if await_health(server, options.port):
            say_what_to_type(options.port)
        code = server.wait()
    return 0 if stopped else code


if __name__ == "__main__":
    sys.exit(main())
