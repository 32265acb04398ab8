# SPDX-License-Identifier: Apache-2.0
"""What ``remote_codec`` saves and costs: how many times shorter blocks get, what a core codes and
decodes in a second, and both beside objects as they are, over links of several rates.

    PYTHONPATH=tests python tools/measure_codec.py --model DIR --text FILE

``--model``: a directory as transformers reads it, whose KV of the text is coded, as bf16 and as fp8
(e4m3). Without it, and beside it: numbers that were drawn. Speeds are of bytes before coding, by
processor time. A link is a bucket in this process whose bytes take as long as they would on it, and
no processor time; ``--s3`` has a real S3 server behind the slowest link, too.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from figures import Record, add_json_option
from machine import Machine
from rich.console import Console
from rich.table import Table

from kvdisk.geometry import HEADER_BYTES
from kvdisk.remote.base import Bucket, ObjectOp, RemoteObject, Result
from kvdisk.remote.client import BucketObjects
from kvdisk.remote.obstore_bucket import ObstoreBucket
from kvdisk.remote.planes import PlanesCodec

Bytes = npt.NDArray[np.uint8]
GBITS = (1, 5, 25)
DEADLINE_S = 120.0
TOKENS = 16
"""Of a block."""
MOST_TOKENS = 1024
MIB = 1 << 20


class Samples:
    """Slots of one kind. ``element_bytes``: as the layout would say."""

    def __init__(self, element_bytes: int, payload: Bytes, slot_bytes: int) -> None:
        self.element_bytes = element_bytes
        size = slot_bytes - HEADER_BYTES
        head = np.zeros(HEADER_BYTES, np.uint8)
        self.slots = [np.concatenate([head, payload[at : at + size]]) for at in range(0, payload.size - size + 1, size)]


def as_bf16(numbers: npt.NDArray[np.float32]) -> Bytes:
    """Return numbers as bf16, rounded to nearest."""
    return ((numbers.view(np.uint32) + 0x8000) >> 16).astype("<u2").view(np.uint8)


def as_fp8(numbers: npt.NDArray[np.float32]) -> Bytes:
    """Return numbers as e4m3, rounded to nearest, as vLLM keeps KV with a scale of 1."""
    codes = np.arange(127)
    power, rest = codes >> 3, codes & 7
    values = np.where(power == 0, rest / 8 * 2.0**-6, (1 + rest / 8) * 2.0 ** (power - 7.0))
    middles = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    found = np.searchsorted(middles, np.abs(numbers))
    return (found | (np.signbit(numbers) << 7)).astype(np.uint8)


def drawn(slot_bytes: int, count: int) -> dict[str, Samples]:
    """Return slots of numbers that were drawn: each channel of 128 has a spread of its own."""
    choose = np.random.default_rng(1)
    elements = count * (slot_bytes - HEADER_BYTES)
    spread = np.exp(choose.normal(0, 1, 128)).astype(np.float32)
    numbers = (choose.normal(0, 1, (elements // 128 + 1, 128)).astype(np.float32) * spread).reshape(-1)[:elements]
    return {
        "bf16, drawn": Samples(2, as_bf16(numbers[: elements // 2]), slot_bytes),
        "fp8, drawn": Samples(1, as_fp8(numbers), slot_bytes),
        "fp32, drawn": Samples(4, numbers[: elements // 4].view(np.uint8), slot_bytes),
        "random bytes": Samples(2, np.frombuffer(choose.bytes(elements), np.uint8), slot_bytes),
    }


def kv_of(model: Path, text: str) -> tuple[npt.NDArray[np.float32], int]:
    """Return the KV that a model has of a text, and the elements of a block: blocks one behind the
    other, of each all layers, of these keys and values, token by token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(model)(text, return_tensors="pt").input_ids[:, :MOST_TOKENS]
    engine = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    with torch.no_grad():
        cache = engine(tokens, use_cache=True).past_key_values
    both = [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]  # 2, heads, tokens, size
    whole = torch.stack(both).float().permute(3, 0, 1, 2, 4)  # tokens, layers, 2, heads, size
    count = len(whole) // TOKENS
    blocks = whole[: count * TOKENS].unflatten(0, (count, TOKENS)).movedim(1, 3)
    return blocks.reshape(-1).contiguous().numpy(), blocks[0].numel()


def of_model(model: Path, text: str) -> dict[str, Samples]:
    """Return the slots of a model's KV, as bf16 and as fp8, each of one block."""
    numbers, elements = kv_of(model, text)
    return {
        f"bf16, {model.name}": Samples(2, as_bf16(numbers), 2 * elements + HEADER_BYTES),
        f"fp8, {model.name}": Samples(1, as_fp8(numbers), elements + HEADER_BYTES),
    }


def per_cpu_second(work: Callable[[], object], byte_count: int) -> float:
    """Return how many MB of so many bytes work does in a second of this thread's processor
    time."""
    began_s = time.thread_time()
    work()
    return byte_count / 1e6 / max(1e-9, time.thread_time() - began_s)


def measure_coding(kinds: dict[str, Samples], rounds: int, record: Record) -> Table:
    """Return how much shorter slots get, and how fast."""
    codec = PlanesCodec()
    table = Table("", "slot", "times shorter", "coded MB/s a core", "decoded MB/s a core")
    for name, samples in kinds.items():
        size, whole = samples.slots[0].size, sum(slot.size for slot in samples.slots)
        coded = [codec.encode(slot, samples.element_bytes) for slot in samples.slots]
        for slot, each in zip(samples.slots, coded, strict=True):
            found = codec.decode(memoryview(each), size)
            assert found is not None and found.tobytes() == slot.tobytes()

        def encode(samples: Samples = samples) -> None:
            for slot in samples.slots:
                codec.encode(slot, samples.element_bytes)

        def decode(coded: Sequence[bytes] = coded, size: int = size) -> None:
            for each in coded:
                codec.decode(memoryview(each), size)

        speeds = [[per_cpu_second(work, whole) for _ in range(rounds)] for work in (encode, decode)]
        shorter = whole / sum(map(len, coded))
        cells = [f"{statistics.median(each):,.0f}" for each in speeds]
        table.add_row(name, f"{size >> 10:,} KiB", f"{shorter:.2f}", *cells)
        record.add("coding", name, "times shorter", [shorter])
        record.add("coding", name, "coded MB/s a core", speeds[0])
        record.add("coding", name, "decoded MB/s a core", speeds[1])
    return table


class Linked:
    """``Bucket`` behind a link: what it moves takes as long as the link would, one after the other
    in each direction."""

    parallel = 64
    hint_life_s = 60.0

    def __init__(self, behind: Bucket, gbits: float) -> None:
        self.name = f"{behind.name} at {gbits:g} Gbit/s"
        self._behind = behind
        self._bytes_per_s = gbits * 1e9 / 8
        self._free_s = {"in": 0.0, "out": 0.0}

    async def _cross(self, way: str, byte_count: int) -> None:
        now_s = time.monotonic()
        self._free_s[way] = max(now_s, self._free_s[way]) + byte_count / self._bytes_per_s
        await asyncio.sleep(self._free_s[way] - now_s)

    async def exists(self, name: str) -> bool:
        """See ``Bucket.exists``."""
        return await self._behind.exists(name)

    async def get(self, name: str, most_bytes: int, take: Callable[[Any], Result]) -> Result | None:
        """See ``Bucket.get``."""
        found: list[bytes] = []

        def keep(body: Any) -> Result:
            found.append(bytes(body))
            return Result.OK

        if await self._behind.get(name, most_bytes, keep) is None:
            return None
        await self._cross("in", len(found[0]))
        return take(found[0])

    async def put(self, name: str, byte_count: int, fill: Callable[[Any], None], *, over: bool = False) -> None:
        """See ``Bucket.put``."""
        await self._cross("out", byte_count)
        await self._behind.put(name, byte_count, fill, over=over)

    def close(self) -> None:
        """See ``Bucket.close``."""
        self._behind.close()


def seconds_of(objects: BucketObjects, op: ObjectOp, asked: Sequence[RemoteObject]) -> tuple[float, float]:
    """Return how long a batch takes, and how much of this process's processor time."""
    began_s, used_s = time.perf_counter(), time.process_time()
    objects.submit(op, asked)
    ((_, results, _),) = objects.poll(DEADLINE_S)
    assert set(results) == {Result.OK}, results
    return time.perf_counter() - began_s, time.process_time() - used_s


def measure_links(
    places: Sequence[tuple[str, Callable[[], Bucket], float]], samples: Samples, rounds: int, record: Record
) -> Table:
    """Return what a batch moves in a second over each link, coded and as it is, in turn."""
    table = Table("", "as it is, MB/s", "coded, MB/s", "coded, of as it is", "processor ms a MB")
    mb = sum(slot.size for slot in samples.slots) / 1e6
    for what, make, gbits in places:
        taken: dict[tuple[ObjectOp, bool], list[tuple[float, float]]] = {}
        with ExitStack() as opened:
            clients = {}
            for coded in (False, True):
                codec = PlanesCodec() if coded else None
                client = BucketObjects(Linked(make(), gbits), deadline_s=DEADLINE_S, codec=codec)
                clients[coded] = opened.enter_context(closing(client))
            for number in range(rounds + 1):
                for coded in (number % 2 == 0, number % 2 == 1):
                    for op, spent in pass_through(clients[coded], samples):
                        if number:
                            taken.setdefault((op, coded), []).append(spent)
        for op in (ObjectOp.PUT, ObjectOp.GET):
            plain, shorter = ([mb / spent_s for spent_s, _ in taken[op, coded]] for coded in (False, True))
            ratios = [b / a for a, b in zip(plain, shorter, strict=True)]
            costs = [[1000 * used_s / mb for _, used_s in taken[op, coded]] for coded in (False, True)]
            row = f"{op.value}, {gbits:g} Gbit/s{what}"
            cpu = " to ".join(f"{statistics.median(each):.2f}" for each in costs)
            rates = [f"{statistics.median(each):,.0f}" for each in (plain, shorter)]
            table.add_row(row, *rates, f"{statistics.median(ratios):.2f}", cpu)
            record.add("links", row, "as it is, MB/s", plain)
            record.add("links", row, "coded, MB/s", shorter)
            record.add("links", row, "coded, of as it is", ratios)
            record.add("links", row, "as it is, processor ms a MB", costs[0])
            record.add("links", row, "coded, processor ms a MB", costs[1])
    return table


def pass_through(objects: BucketObjects, samples: Samples) -> list[tuple[ObjectOp, tuple[float, float]]]:
    """Put slots under new names, and get them again; return what both took."""
    target = [np.empty_like(slot) for slot in samples.slots]
    names = [f"{secrets.token_hex(8)}/{at}" for at in range(len(target))]
    found = []
    for op, memory in ((ObjectOp.PUT, samples.slots), (ObjectOp.GET, target)):
        pairs = zip(names, memory, strict=True)
        asked = [RemoteObject(name, memoryview(slot), samples.element_bytes) for name, slot in pairs]
        found.append((op, seconds_of(objects, op, asked)))
    assert all(map(np.array_equal, samples.slots, target)), "other bytes"
    return found


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a directory as transformers reads it")
    parser.add_argument("--text", type=Path, help="what it is given to read")
    parser.add_argument("--slot-kib", type=int, default=512, help="of a slot of drawn numbers")
    parser.add_argument("--slots", type=int, default=32, help="of drawn numbers")
    parser.add_argument("--gbits", type=float, nargs="*", default=GBITS)
    parser.add_argument("--s3", action="store_true", help="a real S3 server behind the slowest link, too")
    parser.add_argument("--rounds", type=int, default=5)
    add_json_option(parser)
    options = parser.parse_args()
    console, record = Console(highlight=False, width=110), Record()
    kinds = drawn(options.slot_kib << 10, options.slots)
    if options.model is not None:
        kinds |= of_model(options.model, options.text.read_text())
    console.print(measure_coding(kinds, options.rounds, record))
    sent = next(kinds[name] for name in reversed(kinds) if name.startswith("bf16"))
    from support.memory_objects import MemoryBucket

    places: list[tuple[str, Callable[[], Bucket], float]] = [("", MemoryBucket, gbits) for gbits in options.gbits]
    with tempfile.TemporaryDirectory(prefix="codec-") as work:
        server = None
        if options.s3:
            from demo_remote import s3_settings

            server, settings = s3_settings(Path(work) / "s3")
            address, values = settings["remote"], settings["remote_options"]
            places.append((", S3", lambda: ObstoreBucket(address, values, deadline_s=DEADLINE_S), min(options.gbits)))
        try:
            if places:
                console.print(measure_links(places, sent, options.rounds, record))
        finally:
            if server is not None:
                server.kill()
    console.print(Machine.here(Path.cwd()).sentence, soft_wrap=True)
    record.write(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
