# SPDX-License-Identifier: Apache-2.0
"""``kvdisk verify`` beside engines that evict as fast as they can, over what a killed one left,
over several drives."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from live_children import WAIT_S, Child
from support.live_engine import LiveEngine
from support.live_load import LiveLoad, LoadShape
from support.live_model import LiveModel
from support.live_process import ProcessSettings

from kvdisk.cli.indexes import Records
from kvdisk.cli.verify import Verdict, verify_store
from kvdisk.geometry import HEADER_BYTES, slot_offset
from kvdisk.index.reader_process import read_indexes

VERIFY_S = 2.0


def wrong(verdict: Verdict) -> list[object]:
    return [*verdict.wrong, *(problem for home in verdict.homes for problem in home.problems)]


def test_a_store_in_use_is_good_however_fast_its_blocks_leave(tmp_path: Path) -> None:
    store = tmp_path / "store"
    settings = ProcessSettings(str(store), seed=11, windowed=True, blocks=24, cpu_blocks=0, every_s=0.2)
    with Child(tmp_path, settings) as engine:
        engine.wait_serving()
        slots = changed = rounds = 0
        end_s = time.monotonic() + VERIFY_S
        while time.monotonic() < end_s or not (slots and changed):
            assert time.monotonic() < end_s + WAIT_S, (slots, changed)
            verdict = verify_store([store], watch=slowly)
            assert not wrong(verdict)
            (home,) = verdict.homes
            slots, changed, rounds = slots + home.slots, changed + home.changed_slots, rounds + 1
        assert engine.count("evicted_nvme_blocks") or changed
        copy = tmp_path / "copy"
        engine.pause()
        shutil.copytree(store, copy)
        engine.resume()
        engine.assert_killed()
    assert not wrong(verify_store([store])), "what a killed engine left"
    assert not wrong(verify_store([copy])), "a copy of a moment"


def slowly(done_bytes: int, total_bytes: int) -> None:
    """Let blocks leave between the look into the index and the reading of slots."""
    if not done_bytes:
        time.sleep(0.2)


def test_several_drives_and_ranks_that_share(quick_path: Path) -> None:
    dirs = [quick_path / name for name in "abc"]
    model = LiveModel(ranks=2, replicated=True)
    listed = [str(path) for path in dirs]
    config = model.config(listed[0], blocks=300, cpu_bytes=1 << 20, store_dirs=listed, store_decode=True)
    engine = LiveEngine(config, model)
    load = LiveLoad(engine, 3, LoadShape(width=12, forgets=0.3, aborts=0.0))
    for _ in range(50):
        load.run_requests(10)
        if len(blocks_by_drive(dirs[0])) == len(dirs):
            break
    verdict = verify_store(dirs)
    assert not wrong(verdict) and verdict.homes[0].owner == "alive"
    engine.close()
    where = blocks_by_drive(dirs[0])
    assert set(where) == {0, 1, 2}
    verdict = verify_store(dirs)
    assert not wrong(verdict) and verdict.homes[0].blocks == sum(map(len, where.values()))
    assert verdict.homes[0].slots == verdict.homes[0].blocks
    expected = []
    for drive, places in where.items():
        segment, slot = places[0]
        (file,) = (dirs[drive] / "homes").glob(f"*/segments/{segment}/rank0.kv")
        with file.open("r+b") as stream:
            stream.seek(slot_offset(model.geometry.groups[0].slot_bytes, slot) + HEADER_BYTES)
            stream.write(b"flipped")
        expected.append((file, slot, "checksum"))
    found = [(one.path, one.slot, one.check) for one in verify_store(dirs).wrong]
    assert sorted(found) == sorted(expected)


def blocks_by_drive(store: Path) -> dict[int, list[tuple[int, int]]]:
    """Segment and slot of each block that the store's one index names."""
    (home,) = (store / "homes").iterdir()
    (index,) = read_indexes([home / "index"])
    drives = {segment.segment: segment.drive for segment in index.segments}
    found: dict[int, list[tuple[int, int]]] = {}
    for record in Records(index.blocks):
        found.setdefault(drives[record.slot.segment], []).append(tuple(record.slot))
    return found
