# SPDX-License-Identifier: Apache-2.0
"""kvdisk's tier behind vLLM's real manager of tiers, under random requests and faults: every byte
that a request uses is compared, every request is answered, and no row of memory is lost."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from obstore.store import from_url
from support.drive_blocks import bytes_for
from support.s3_server import S3Server
from support.tiering import TOKENS
from test_tier import ROW_BYTES, Bench, Make
from test_tier import make as make  # noqa: PLC0414 - a fixture
from test_tier_drive import make as make_on_drive  # noqa: F401 - a fixture
from vllm.v1.kv_offload.base import OffloadKey

from kvdisk.connector import tier as tiers
from kvdisk.device.listing import list_homes
from kvdisk.store import BlockKind, Result
from kvdisk.tier_settings import DETECTOR

SEEDS = 120
MORE_SEEDS = 2000
DRIVE_SEEDS = 16
BUCKET_SEEDS, MOST_BUCKET_SEEDS = 4, 24
STEPS = 120
STEP_S = 0.01
WAIT_S = 0.5
"""``lookup_wait_s``, on the clock of steps."""
MOST_STEPS = 40 * int(WAIT_S / STEP_S)
"""Within which all requests are answered once no job is held back: each may wait twice, and as many
come before it as there are."""
SAFETY_S = 60.0
MOST_REQUESTS = 8
BAD_LOADS = (Result.ABSENT, Result.CHECKSUM, Result.IO_ERROR, Result.DEADLINE)
BAD_STORES = (Result.REFUSED, Result.NO_ROOM, Result.NO_SPACE)


class Request:
    """``at``: chunks that it has, from memory or computed. ``is_answered``: how much hit is
    known."""

    def __init__(self, name: str, keys: list[OffloadKey]) -> None:
        self.name = name
        self.keys = keys
        self.at = 0
        self.is_answered = False


class World:
    """A bench, its requests, and the weights that the model has now."""

    def __init__(self, make: Make, seed: int, folder: Path) -> None:
        self.random = random.Random(seed)
        self.make, self.folder = make, folder
        self.now = 1000.0
        self.rows = self.random.choice([3, 8, 24, 64])
        self.weights = 0
        self.names = 0
        self.requests: list[Request] = []
        self.seen: set[str] = set()
        self.open()

    def open(self) -> None:
        self.bench: Bench = self.make(rows=self.rows, lookup_wait_s=WAIT_S, **self.backpressure())
        self.store._most_blocks = self.random.choice([10, 100, 1 << 20])

    def backpressure(self) -> dict[str, Any]:
        return self.random.choice([{}, {"backpressure": {"backpressure_cls": DETECTOR, "most_rows": 0.3}}])

    @property
    def store(self) -> Any:
        return self.bench.store

    def content_of(self, key: OffloadKey) -> np.ndarray[Any, Any]:
        """Return what the model computes with its weights."""
        return np.random.default_rng([*key, self.weights]).integers(0, 256, ROW_BYTES, np.uint8)

    # -- what happens --------------------------------------------------------------------------

    def come(self) -> None:
        if len(self.requests) < MOST_REQUESTS:
            self.names += 1
            document, chunks = self.random.randrange(6), self.random.randint(1, 14)
            name = f"{self.names}"
            keys = self.bench.begin(name, document, chunks, document % 2, kv_transfer_params=self.hints())
            self.requests.append(Request(name, keys))

    def hints(self) -> dict[str, Any] | None:
        """Return KV hints, sometimes for a part of the prompt, and often none."""
        actions = self.random.sample(
            ["kv.pin", "kv.retain", "kv.demote", "kv.prefetch"], self.random.choice([0, 0, 1, 2])
        )
        kept = {"seconds": self.random.choice([0.1, 60]), "tokens": self.random.choice([TOKENS, 5 * TOKENS, 999])}
        payloads = {"kv.pin": kept, "kv.retain": kept}
        listed = [{"action_type": action, "payload": payloads.get(action, {})} for action in actions]
        return {"kv_hints": {"actions": listed}} if listed else None

    def step(self) -> None:
        """One of the scheduler's: some requests get on, some of them end."""
        new = []
        self.now += STEP_S
        for request in self.random.sample(self.requests, len(self.requests)):
            if not request.is_answered:
                hits = self.bench.look(request.name, request.keys)
                if hits is not None:
                    self.use(request, hits)
                    new.append(request.name)
            elif request.at < len(request.keys):
                self.compute(request, request.keys[request.at : request.at + self.random.randint(1, 5)])
        if self.random.random() < 0.05:
            self.abort()
        self.bench.step(*new)
        for request in [each for each in self.requests if each.is_answered and each.at == len(each.keys)]:
            self.end(request)

    def use(self, request: Request, hits: int) -> None:
        request.is_answered, request.at = True, hits
        keys = request.keys[:hits]
        if keys:
            spec = self.bench.manager.prepare_load(keys, self.bench.requests[request.name])
            for key, row in zip(keys, spec.chunk_ids.tolist(), strict=True):
                assert np.array_equal(self.bench.rows[row], self.content_of(key)), (request.name, key, row)
            self.bench.manager.complete_load(keys, self.bench.requests[request.name])
            self.seen.add("hit")

    def compute(self, request: Request, keys: list[OffloadKey]) -> None:
        request.at += len(keys)
        if not self.bench.compute(request.name, keys, self.content_of):
            self.seen.add("no row")

    def end(self, request: Request) -> None:
        self.requests.remove(request)
        self.bench.end(request.name)

    def abort(self) -> None:
        if self.requests:
            self.end(self.random.choice(self.requests))

    def spoil(self) -> None:
        """Loads of some blocks, and stores of others, end badly from now on."""
        self.store.bad = {key: self.random.choice(BAD_LOADS) for key in self.some_blocks()}
        coming = [self.bench.tier._names.block(key) for request in self.requests for key in request.keys]
        self.store.refused = {key: self.random.choice(BAD_STORES) for key in coming if self.random.random() < 0.3}

    def some_blocks(self) -> list[Any]:
        return [key for key in self.store._blocks if self.random.random() < 0.3]

    def lose(self) -> None:
        """Blocks leave the store, some of them between their hit and their load."""
        for key in self.some_blocks():
            del self.store._blocks[key]

    def hold(self) -> None:
        self.store.holds = not self.store.holds

    def reset(self) -> None:
        """The weights change. Some of what runs goes on, and stores chunks of the old ones: vLLM's
        memory is made to forget these; the drive must not have them."""
        for request in list(self.requests):
            if not request.is_answered or self.random.random() < 0.5:
                self.end(request)
        self.go_on()
        self.bench.manager.reset_cache()
        getattr(self.bench.manager, "on_reset_flushed", lambda: None)()
        for request in list(self.requests):
            if request.at < len(request.keys):
                self.compute(request, request.keys[request.at :])
                self.seen.add("old weights")
            self.bench.rest()
            self.end(request)
        self.bench.rest()
        self.bench.forget_memory()
        self.weights += 1

    def restart(self) -> None:
        """The engine ends, perhaps with jobs out, and starts again, with the files' weights."""
        for request in list(self.requests):
            self.end(request)
        self.forget_weights()
        self.bench.close()
        self.open()

    def forget_weights(self) -> None:
        """The model is that of the files again. This store has no epochs."""
        if self.weights:
            self.store._blocks.clear()
            self.weights = 0

    def go_on(self) -> None:
        """Nothing is held back any more."""
        self.store.holds = False

    def finish(self) -> None:
        """All are answered, and the engine comes to rest. What is bad stays so."""
        self.go_on()
        end_s = time.monotonic() + SAFETY_S
        for _ in range(MOST_STEPS) if type(self) is World else iter(lambda: time.monotonic() < end_s, False):
            if not self.requests:
                break
            self.step()
        assert not self.requests, "a request waits for ever"
        self.bench.rest()
        assert self.bench.tier._held == 0 and not self.bench.tier._requests
        keys = self.bench.begin("whole", 99, self.rows)
        prepared = self.bench.manager.prepare_store(keys, self.bench.requests["whole"])
        assert prepared is not None and len(prepared.keys_to_store) == self.rows, "a row of memory is lost"
        self.bench.manager.complete_store(prepared.keys_to_store, self.bench.requests["whole"], success=False)
        self.bench.end("whole")


OFTEN = {"come": 30, "step": 100, "abort": 3, "spoil": 3, "lose": 3, "hold": 4, "reset": 1, "restart": 1}


def run(make: Make, seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    world = World(make, seed, folder)
    world.store._blocks.clear()
    monkeypatch.setattr(tiers, "time", SimpleNamespace(monotonic=lambda: world.now))
    for _ in range(STEPS):
        (act,) = world.random.choices(list(OFTEN), list(OFTEN.values()))
        getattr(world, act)()
        world.seen.add(act)
    world.finish()
    assert not world.bench.tier.is_off
    world.bench.close()
    return world.seen


def test_random_requests_and_faults(make, tmp_path, monkeypatch):
    seen = set[str]()
    for seed in range(SEEDS):
        seen |= run(make, seed, tmp_path, monkeypatch)
    assert seen == {*OFTEN, "hit", "no row", "old weights"}


class DriveWorld(World):
    """The same with a real store on a drive, and a mover that is stopped, or killed."""

    stopped = False

    def open(self) -> None:
        nvme_bytes = bytes_for([BlockKind(ROW_BYTES, TOKENS)] * 2, self.random.choice([40, 400]))
        self.bench = self.make(
            rows=self.rows, lookup_wait_s=2.0, nvme_bytes=nvme_bytes, **self.settings(), **self.backpressure()
        )
        self.stopped = False

    def settings(self) -> dict[str, Any]:
        return {}

    def step(self) -> None:
        super().step()
        time.sleep(self.random.choice([0, 0, 0.002]))

    def spoil(self) -> None:
        """A bit of some slot is flipped."""
        self.go_on()  # or it may hold the store's lock
        (home,) = list_homes(self.folder / "store")
        for path in sorted(home.segments_path.glob("*/rank0.kv")):
            if self.random.random() < 0.5:
                with path.open("r+b") as opened:
                    opened.seek(self.random.randrange(path.stat().st_size))
                    at, byte = opened.tell(), opened.read(1)
                    opened.seek(at)
                    opened.write(bytes([byte[0] ^ 1 << self.random.randrange(8)]))

    def lose(self) -> None:
        """The mover ends: the store is off until the engine starts again."""
        os.kill(self.bench.tier._mover.pid, signal.SIGKILL)
        self.finish()
        self.restart()

    def hold(self) -> None:
        self.stopped = not self.stopped
        os.kill(self.bench.tier._mover.pid, signal.SIGSTOP if self.stopped else signal.SIGCONT)

    def go_on(self) -> None:
        if self.stopped:
            self.hold()

    def reset(self) -> None:
        self.go_on()
        super().reset()

    def forget_weights(self) -> None:
        """The store has an epoch for each."""
        self.weights = 0

    def restart(self) -> None:
        self.go_on()
        super().restart()


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(DRIVE_SEEDS))
def test_on_a_real_drive(make_on_drive, tmp_path, seed):  # noqa: F811
    world = DriveWorld(make_on_drive, seed, tmp_path)
    for _ in range(STEPS):
        (act,) = world.random.choices(list(OFTEN), list(OFTEN.values()))
        getattr(world, act)()
    world.finish()
    world.bench.close()


class BucketWorld(DriveWorld):
    """The same on hosts that share a bucket: a start may be on another one, whose drive is empty.
    ``loaded_bytes``: from the bucket, in all."""

    server: S3Server
    loaded_bytes = 0

    def __init__(self, make: Make, seed: int, folder: Path, server: S3Server) -> None:
        self.server, self.url = server, f"s3://kvdisk-tests/{folder.name}"
        self.bucket = from_url(self.url, config=server.options, client_options={"allow_http": True})
        super().__init__(make, seed, folder)

    def settings(self) -> dict[str, Any]:
        return {"remote": self.url, "remote_options": self.server.options, "remote_admission": "all"}

    def restart(self) -> None:
        self.note_loaded()
        super().restart()

    def forget_weights(self) -> None:
        super().forget_weights()
        self.is_elsewhere = self.random.random() < 0.5

    def open(self) -> None:
        if getattr(self, "is_elsewhere", False):
            shutil.rmtree(self.folder / "store")
        super().open()

    def note_loaded(self) -> None:
        store = self.bench.tier._store
        if store is not None:  # else an error has switched it off
            self.loaded_bytes += store.stats().sum_of("transfer_bytes.remote_to_cpu")

    def spoil(self) -> None:
        """A bit of some slot, or of some object, is flipped."""
        super().spoil()
        names = [each["path"] for page in self.bucket.list() for each in page]
        for name in self.random.sample(names, min(2, len(names))):
            body = bytearray(bytes(self.bucket.get(name).bytes()))
            body[self.random.randrange(len(body))] ^= 1 << self.random.randrange(8)
            self.bucket.put(name, bytes(body))


@pytest.mark.torture
def test_on_hosts_that_share_a_bucket(make_on_drive, tmp_path, s3_server):  # noqa: F811
    """How much comes from another host depends on how fast the bucket answers."""
    loaded_bytes, often = 0, OFTEN | {"restart": 8, "reset": 0.3}
    for seed in range(MOST_BUCKET_SEEDS):
        world = BucketWorld(make_on_drive, seed, tmp_path, s3_server)
        for _ in range(2 * STEPS):
            (act,) = world.random.choices(list(often), list(often.values()))
            getattr(world, act)()
        world.finish()
        world.note_loaded()
        loaded_bytes += world.loaded_bytes
        world.bench.close()
        shutil.rmtree(tmp_path / "store")
        if seed + 1 >= BUCKET_SEEDS and loaded_bytes > 8 * ROW_BYTES:
            return
    raise AssertionError(f"only {loaded_bytes:.0f} bytes came from another host")


@pytest.mark.torture
@pytest.mark.parametrize("first", range(1000, 1000 + MORE_SEEDS, 500))
def test_many_more_of_them(make, tmp_path, monkeypatch, first):
    for seed in range(first, first + 500):
        run(make, seed, tmp_path, monkeypatch)
