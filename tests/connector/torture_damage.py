# SPDX-License-Identifier: Apache-2.0
"""What can happen to the files of a store between two engines."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

from kvdisk.device.listing import list_homes
from kvdisk.geometry import HEADER_BYTES, SEGMENT_HEADER_BYTES

SLOT_BYTES = 32768 + HEADER_BYTES
"""Of both tiny models: 32 tokens, two layers of a group, two heads of 32, keys and values, four
bytes."""


def damage(store: Path, kind: str, rng: random.Random) -> None:
    """Do one kind of damage to a home of the store, in a segment of it where the kind is of one."""
    home = rng.choice([home for home in list_homes(store) if home.segments])
    files = sorted(home.segments_path.glob("*/rank0.kv"))
    file, index = rng.choice(files), home.index_path / "data.mdb"
    if kind in {"payloads", "headers", "swapped slots"}:
        _damage_slots(file, kind, rng)
    elif kind == "truncated":
        os.truncate(file, rng.randrange(file.stat().st_size))
    elif kind == "missing file":
        file.unlink()
    elif kind == "file of another segment":
        shutil.copyfile(files[0] if file != files[0] else files[-1], f"{file}.copy")
        Path(f"{file}.copy").rename(file)
    elif kind == "segment header":
        with file.open("r+b") as stream:
            stream.write(rng.randbytes(100))
    elif kind == "index deleted":
        index.unlink()
    elif kind == "index garbage":
        index.write_bytes(rng.randbytes(index.stat().st_size))
    elif kind == "index truncated":
        os.truncate(index, index.stat().st_size // 2)
    else:
        assert kind == "HOME garbage", kind
        (home.path / "HOME").write_bytes(rng.randbytes(50))


def _damage_slots(file: Path, kind: str, rng: random.Random) -> None:
    slots = (file.stat().st_size - SEGMENT_HEADER_BYTES) // SLOT_BYTES
    with file.open("r+b") as stream:
        for slot in range(0, slots - 1, 2):
            start = SEGMENT_HEADER_BYTES + slot * SLOT_BYTES
            if kind == "swapped slots":
                stream.seek(start)
                first, second = stream.read(SLOT_BYTES), stream.read(SLOT_BYTES)
                stream.seek(start)
                stream.write(second + first)
            else:
                within = rng.randrange(HEADER_BYTES) if kind == "headers" else HEADER_BYTES + rng.randrange(32000)
                stream.seek(start + within)
                stream.write(rng.randbytes(8))
