# SPDX-License-Identifier: Apache-2.0
"""A process with a store beside others: ``joint_cap_owner.py PATH RANK RANKS SEED JOINT``. It puts
and gets until it is killed. ``JOINT``: the name of their joint cap; empty: there is none."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from support.drive_blocks import bytes_for

from kvdisk.config import Config
from kvdisk.store import BlockStore, Get, JointCap, Put, Result
from kvdisk.testing.store_conformance import KINDS, content_of, finish, holds, key_of, make_rows

BLOCKS = 120
"""Of a share, where there are two."""
CAP = 2 * bytes_for(KINDS, BLOCKS)


def live(path: Path, rank: int, ranks: int, seed: int, joint_name: str) -> None:
    """Put and get until killed; say what was found, when blocks leave for others, and each wrong
    byte."""
    dice, rows, tag, is_full = random.Random(seed), make_rows(), 0, False
    values = {"store_dirs": str(path), "nvme_bytes": CAP // ranks, "index_commit_s": 0.005, "nvme_admission": "all"}
    joint = JointCap(joint_name, CAP, f"rank {rank}") if joint_name else None
    store = BlockStore.open(Config.from_mapping(values), bytes([rank]) * 32, {}, KINDS, rows, joint_cap=joint)
    print(f"found {len(store.keys())}", flush=True)
    while True:
        tag += 1
        keys = [key_of(number, dice.randrange(2)) for number in dice.sample(range(4 * BLOCKS), 16)]
        if tag % 3:
            for at, key in enumerate(keys):
                rows[at] = content_of(key)
            store.put(tag, [Put(key, None, at) for at, key in enumerate(keys)], wait_s=1.0)
        else:
            store.get(tag, [Get(key, at) for at, key in enumerate(keys)])
        (ended,) = finish(store, tag).values()
        for at, (key, result) in enumerate(zip(keys, ended.results, strict=True)):
            if result is Result.DONE and not holds(rows, at, key, KINDS):
                print("WRONG BYTES", flush=True)
        if not is_full and store.stats()["evicted_blocks.nvme"]:
            is_full = True
            print("full", flush=True)


if __name__ == "__main__":
    live(Path(sys.argv[1]), *map(int, sys.argv[2:5]), sys.argv[5])
