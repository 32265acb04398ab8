# SPDX-License-Identifier: Apache-2.0
"""Stores that the real rooms have made, and the installed command, for the tests of
``kvdisk.cli``."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from typer.testing import CliRunner, Result

from kvdisk.blocks import Slot, make_block_key
from kvdisk.cli.main import app
from kvdisk.device.home import Home
from kvdisk.device.segment import create_segment
from kvdisk.device.store import Store
from kvdisk.engine_store import describe_geometry
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.index.base import BlockRecord, SegmentRecord
from kvdisk.index.lmdb_index import LmdbIndex, map_bytes_for
from kvdisk.messages import SegmentSpec

COMMAND = Path(sysconfig.get_path("scripts")) / "kvdisk"
CAP = 64 << 20
SLOTS = 8
LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8}
LLAMA |= {"num_key_value_heads": 2, "torch_dtype": "bfloat16"}
"""Of a small model: keys and values of 64 numbers in two heads of four layers."""
LLAMA_TOKEN_BYTES = 4 * 2 * 2 * 64 * 2


class Model(NamedTuple):
    """A namespace to fill."""

    fingerprint: bytes
    geometry: Geometry
    description: dict[str, Any]


PLAIN_GEOMETRY = Geometry((GroupGeometry(0, 16, 4000),), rank_count=2, hash_tokens=16)
PLAIN = Model(
    b"\x3f" * 32,
    PLAIN_GEOMETRY,
    {"model": "some/model-7B", "dtype": "torch.bfloat16", "kv_dtype": "auto", "tensor_parallel": 2}
    | describe_geometry(PLAIN_GEOMETRY),
)
HYBRID_GEOMETRY = Geometry((GroupGeometry(0, 16, 4000), GroupGeometry(1, 32, 9000, 1024)), rank_count=1, hash_tokens=16)
HYBRID = Model(
    b"\x9b" * 32,
    HYBRID_GEOMETRY,
    {"model": "/models/of/hybrid-1B", "dtype": "torch.float16", "kv_dtype": "fp8", "tensor_parallel": 1}
    | {"geometry": describe_geometry(HYBRID_GEOMETRY)},
)


def add_segment(
    home: Home, index: LmdbIndex, model: Model, number: int, slot_bytes: int, slots: int, drive: int = 0
) -> None:
    """Make a segment's files and its record."""
    ranks = model.geometry.rank_count
    for rank in range(ranks):
        spec = SegmentSpec(number, slot_bytes, slots, drive)
        create_segment(home.folder(drive), spec, rank, ranks, model.fingerprint).close()
    index.put_segment(SegmentRecord(number, slot_bytes, slots, drive))


def fill_home(home: Home, model: Model, segments: int, *, used: int = 5, stored_s: int = 1000) -> LmdbIndex:
    """Give a home segments in turn of each group, each with ``used`` blocks stored a second
    apart."""
    index = LmdbIndex(home.index_path, map_bytes=map_bytes_for(1000))
    groups = model.geometry.groups
    for segment in range(segments):
        group = groups[segment % len(groups)]
        add_segment(home, index, model, segment, group.slot_bytes, SLOTS)
        keys = [make_block_key(bytes([segment, slot]) * 16, group.group) for slot in range(used)]
        epoch = 0 if segment < 2 else 77
        index.put([BlockRecord(epoch, key, Slot(segment, i), i + 1, None, stored_s + i) for i, key in enumerate(keys)])
    assert index.flush(600)
    return index


def leave_home(path: Path, model: Model, segments: int, *, last_use_s: int, clean: bool = True, used: int = 5) -> str:
    """Be an engine that takes a home, fills it and ends; return the home's id."""
    home = Store.open(path, clock=lambda: last_use_s).acquire_home(model.fingerprint, model.description, CAP)
    fill_home(home, model, segments, used=used, stored_s=last_use_s - 100).close()
    home.close(clean=clean)
    return home.id


def run(
    *arguments: object, obey_modes: bool = False, stdout: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the installed command. ``obey_modes``: without root's power over permissions, where it
    has it. ``stdout``: the file that its output goes to."""
    target = os.open(stdout, os.O_WRONLY) if stdout else subprocess.PIPE
    return subprocess.run(
        [str(COMMAND), *map(str, arguments)],
        stdout=target,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "FORCE_COLOR"} | environment,
        preexec_fn=drop_power if obey_modes else None,
    )


def run_json(*arguments: object, without: Sequence[str] = (), obey_modes: bool = False) -> dict[str, Any]:
    """Return what the installed command prints with ``--json``. ``without``: modules that it cannot
    load."""
    with tempfile.TemporaryDirectory() as absent:
        for name in without:
            Path(absent, f"{name}.py").write_text("raise ImportError('this must not be loaded')")
        first = os.pathsep.join([absent, *filter(None, sys.path)])
        done = run(*arguments, "--json", obey_modes=obey_modes, PYTHONPATH=first)
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def drop_power() -> None:
    drop_from_bounding_set, to_write, to_read = 24, 1, 2
    for power in (to_write, to_read):
        ctypes.CDLL(None).prctl(drop_from_bounding_set, power, 0, 0, 0)


def run_here(*arguments: object, typed: str | None = None) -> Result:
    """Run the command in this process, which is quicker. ``typed``: on its standard input."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=typed)


def json_of(*arguments: object, code: int = 0) -> dict[str, Any]:
    """Return the object that a command prints with ``--json``, once it has ended with this code."""
    done = run_here(*arguments, "--json")
    assert (done.exit_code, done.stderr) == (code, "")
    found: dict[str, Any] = json.loads(done.stdout)
    assert "ok" not in found or found["ok"] is (code == 0)
    return found


def inspect_json(path: Path, *, code: int = 0) -> dict[str, Any]:
    return json_of("inspect", path, code=code)


def refused(*arguments: object, code: int = 2) -> str:
    """Return the one sentence that a command says which does nothing, and ends with this code."""
    done = run_here(*arguments)
    assert (done.exit_code, done.stdout) == (code, "")
    return sentence(done.stderr)


def sentence(said: str) -> str:
    """Return what is said on standard error, which is one sentence."""
    assert said.startswith("kvdisk: ") and said.endswith(".\n") and said.count("\n") == 1, said
    return said


OWNER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import cli_stores as t
home = t.Store.open(Path(sys.argv[2])).acquire_home(t.PLAIN.fingerprint, t.PLAIN.description, t.CAP)
index = t.fill_home(home, t.PLAIN, 1, stored_s=5000) if sys.argv[3] == "filled" else None
print(home.id, flush=True)
for line in sys.stdin:
    index.put([t.BlockRecord(0, t.make_block_key(b"more" * 8, 0), t.Slot(0, 6), 9)])
    print(index.flush(600), index.poll().dropped_puts, flush=True)
"""


class Owner:
    """An engine that lives in a process of its own."""

    def __init__(self, path: Path, how: str = "filled") -> None:
        command = [sys.executable, "-c", OWNER, str(Path(__file__).parent), str(path), how]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.home_id = self.answer()

    def answer(self) -> str:
        assert self.child.stdout is not None
        line = self.child.stdout.readline().strip()
        assert line, "the owner died"
        return line

    def put_one(self) -> str:
        assert self.child.stdin is not None
        self.child.stdin.write("put\n")
        self.child.stdin.flush()
        return self.answer()

    def kill(self) -> None:
        self.child.kill()
        self.child.communicate()
