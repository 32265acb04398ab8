# SPDX-License-Identifier: Apache-2.0
"""What the remote tier moves beside its store's own client, from which hit on a load pays, and what
a store that is down costs.

    PYTHONPATH=tests python tools/measure_remote.py objects prompts down

Real servers on this machine's loopback: SeaweedFS (S3), and a Mooncake Store. ``objects``: the
same batches through ``BucketObjects`` and through obstore or Mooncake's client alone, in turn; a
ratio is the median of the rounds' ratios. CPU time is of the client: all its threads, and its
child. Names are new in each round, and nobody has read them.
``prompts``: time to first token of a prompt that one engine has sent to S3 and a fresh one loads,
beside computing it. ``down``: two engines in turn on prompts that nobody has seen, one of them with
a ``remote`` that does not answer.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from demo import WARM_UP, WORK, build_model
from demo_remote import STORES
from engine_child import EngineChild
from figures import Record, add_json_option
from machine import Machine
from measure_overhead import make_prompts, take_turn
from rich.console import Console
from rich.table import Table

from kvdisk.config import Config
from kvdisk.remote.base import ObjectOp, RemoteObject, Result
from kvdisk.remote.client import BucketObjects, open_remote

BATCHES = ((256 << 10, 64), (2 << 20, 16))
"""Bytes of an object, and objects of a batch."""
GETS = 4
"""Passes of one measurement; a put has one."""
DEADLINE_S = 120.0
LENGTHS = (64, 128, 256, 512, 1000, 2000, 4000)
VOCABULARY = 4096
WARM_TOKENS = 300
"""Of a prompt that pays for what the first one costs."""
DOWN, WITHOUT = "remote that is down", "no remote"
MIB = 1 << 20


class Moved(NamedTuple):
    """One pass over a batch, the mean of a measurement."""

    seconds: float
    cpu_s: float


Mover = Callable[[ObjectOp, list[str], list[memoryview]], None]


def cpu_s() -> float:
    """Return the CPU time of this process and of its children that are clients."""
    own = time.process_time()
    clients = (each for each in psutil.Process().children() if "mooncake_process" in " ".join(each.cmdline()))
    return own + sum(sum(client.cpu_times()[:2]) for client in clients)


def through_tier(objects: BucketObjects) -> Mover:
    """Move a batch as a worker does."""

    def move(op: ObjectOp, names: list[str], buffers: list[memoryview]) -> None:
        objects.submit(op, [RemoteObject(*pair) for pair in zip(names, buffers, strict=True)])
        ((_, results, _),) = objects.poll(DEADLINE_S)
        assert set(results) == {Result.OK}, results

    return move


def obstore_alone(settings: dict[str, Any]) -> Mover:
    """Move a batch with obstore's own calls, all at once."""
    import obstore
    from obstore.store import from_url

    store = from_url(settings["remote"], config=settings["remote_options"], client_options={"allow_http": True})

    async def run(op: ObjectOp, names: list[str], buffers: list[memoryview]) -> None:
        async def get(name: str) -> None:
            await (await obstore.get_async(store, name)).bytes_async()

        put = obstore.put_async
        calls = map(get, names) if op is ObjectOp.GET else map(put, [store] * len(names), names, buffers)
        await asyncio.gather(*calls)

    loop = asyncio.new_event_loop()
    return lambda *asked: loop.run_until_complete(run(*asked))


def mooncake_alone(settings: dict[str, Any]) -> Mover:
    """Move a batch with one call of Mooncake's own, from and to registered memory."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    master = settings["remote"].removeprefix("mooncake://")
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master)
    assert code == 0, code
    known: set[int] = set()

    def move(op: ObjectOp, names: list[str], buffers: list[memoryview]) -> None:
        addresses = [np.frombuffer(buffer, np.uint8).ctypes.data for buffer in buffers]
        lengths = list(map(len, buffers))
        if addresses[0] not in known:
            known.add(addresses[0])
            assert store.register_buffer(addresses[0], sum(lengths)) == 0
        call = store.batch_get_into if op is ObjectOp.GET else store.batch_put_from
        codes = call(names, addresses, lengths)
        assert min(codes) >= 0, codes

    return move


def measure_objects(options: argparse.Namespace, work: Path, record: Record) -> Table:
    """Return a table of both clients."""
    table = Table("", "tier MB/s", "lowest to highest", "alone MB/s", "lowest to highest", "ratio", "CPU ms/MiB")
    for name in STORES:
        server, settings = STORES[name](work / name)
        try:
            objects = open_remote(Config.from_mapping(settings | {"remote_deadline_s": DEADLINE_S}))
            alone = obstore_alone(settings) if name == "S3" else mooncake_alone(settings)
            for byte_count, count in BATCHES:
                taken = measure_batch(through_tier(objects), alone, byte_count, count, options.rounds)
                for op in (ObjectOp.PUT, ObjectOp.GET):
                    what = f"{name} {op.value} {byte_count >> 10} KiB x {count}"
                    both = taken[op, "tier"], taken[op, "alone"]
                    table.add_row(what, *note_batch(record, what, *both, byte_count * count / MIB))
            objects.close()
        finally:
            server.kill()
    return table


def measure_batch(
    tier: Mover, alone: Mover, byte_count: int, count: int, rounds: int
) -> dict[tuple[ObjectOp, str], list[Moved]]:
    """Move one batch with both, in turn; return the rounds of each, by direction."""
    taken: dict[tuple[ObjectOp, str], list[Moved]] = {}
    memory = memoryview(np.random.default_rng(1).bytes(byte_count * count))
    target = memoryview(bytearray(byte_count * count))
    movers = {"tier": tier, "alone": alone}
    for number in range(rounds + 1):
        order = list(movers) if number % 2 else list(reversed(movers))
        names = {who: [f"{secrets.token_hex(8)}/{at}" for at in range(count)] for who in movers}
        for op, whole in ((ObjectOp.PUT, memory), (ObjectOp.GET, target)):
            parts = [whole[at * byte_count : (at + 1) * byte_count] for at in range(count)]
            for who in order:
                passes = GETS if op is ObjectOp.GET else 1
                used_s, start_s = cpu_s(), time.perf_counter()
                for _ in range(passes):
                    movers[who](op, names[who], parts)
                moved = Moved((time.perf_counter() - start_s) / passes, (cpu_s() - used_s) / passes)
                if number:
                    taken.setdefault((op, who), []).append(moved)
    return taken


def note_batch(record: Record, what: str, ours: Sequence[Moved], theirs: Sequence[Moved], mib: float) -> list[str]:
    """Note the rounds of a batch; return the cells of its row."""
    cells: list[str] = []
    ratios = [b.seconds / a.seconds for a, b in zip(ours, theirs, strict=True)]
    medians = []
    for name, moved in (("tier", ours), ("alone", theirs)):
        rates = [mib * MIB / 1e6 / each.seconds for each in moved]
        cpu_ms = [1000 * each.cpu_s / mib for each in moved]
        record.add("objects", what, f"{name}, MB/s", rates)
        record.add("objects", what, f"{name}, processor ms a MiB", cpu_ms)
        cells += [f"{statistics.median(rates):,.0f}", f"{min(rates):,.0f} to {max(rates):,.0f}"]
        medians.append(statistics.median(cpu_ms))
    record.add("objects", what, "tier, of alone", ratios)
    return [*cells, f"{statistics.median(ratios):.2f}", f"{medians[0]:.2f}, alone {medians[1]:.2f}"]


def measure_prompts(options: argparse.Namespace, work: Path, record: Record) -> Table:
    """Return the time to first token by the length of the prompt: computed, and loaded from S3."""
    prompts = [make_prompts(length, options.rounds, length, VOCABULARY) for length in options.lengths]
    flat = [prompt for each in prompts for prompt in each]
    server, settings = STORES["S3"](work / "S3")
    try:
        shared = settings | {"cpu_bytes": "1GiB", "remote_admission": "all", "remote_deadline_s": DEADLINE_S}
        longest = max(*options.lengths, WARM_TOKENS) + 8
        found = []
        for host in ("A", "B"):
            config = shared | {"prefetch": False}
            with EngineChild(build_model(), work / host, extra_config=config, max_model_len=longest) as engine:
                engine.generate([WARM_UP, *make_prompts(1, 1, WARM_TOKENS, VOCABULARY)], 2)
                answers = engine.generate(flat, 2, together=False)
                engine.drain()
                found.append(answers)
    finally:
        server.kill()
    table = Table("prompt tokens", "loaded", "computed", "from S3", "ratio")
    for at, length in enumerate(options.lengths):
        part = slice(at * options.rounds, (at + 1) * options.rounds)
        computed, loaded = ([answer.ttft_s for answer in answers[part]] for answers in found)
        cached = statistics.median(answer.cached for answer in found[1][part])
        times = [statistics.median(each) for each in (computed, loaded)]
        table.add_row(f"{length:,}", f"{cached:,.0f}", *(f"{s:.3f} s" for s in times), f"{times[1] / times[0]:.2f}")
        row = f"{length:,} tokens"
        record.add("prompts", row, "loaded", [cached])
        record.add("prompts", row, "computed", computed, "s")
        record.add("prompts", row, "from S3", loaded, "s")
        record.add("prompts", row, "ratio", [times[1] / times[0]])
    assert [answer.tokens for answer in found[0]] == [answer.tokens for answer in found[1]], "other tokens"
    return table


def watch_steps(llm: Any) -> None:
    """Note how long the longest step takes from now on. In the engine's process."""
    engine = llm.llm_engine
    step, engine.longest_step_s = getattr(engine, "plain_step", engine.step), 0.0
    engine.plain_step = step

    def timed() -> Any:
        start_s = time.perf_counter()
        outputs = step()
        engine.longest_step_s = max(engine.longest_step_s, time.perf_counter() - start_s)
        return outputs

    engine.step = timed


def longest_step_s(llm: Any) -> float:
    """Return it. In the engine's process."""
    found: float = llm.llm_engine.longest_step_s
    return found


def measure_down(options: argparse.Namespace, work: Path, record: Record) -> Table:
    """Return throughput and longest steps with a remote that is down, and without one."""
    own = {"cpu_bytes": "1GiB", "nvme_bytes": "4GiB", "segment_bytes": "256MiB"}
    there = {"aws_endpoint": "http://127.0.0.1:9", "aws_region": "x", "aws_access_key_id": "x"}
    remote = {"remote": "s3://kvdisk/x", "remote_options": there | {"aws_secret_access_key": "x"}}
    limits: dict[str, Any] = {"max_model_len": 1040, "max_num_seqs": 8}
    ratios, cpu, steps = [], [], {DOWN: [0.0], WITHOUT: [0.0]}
    model = build_model()
    with (
        EngineChild(
            model, work / "down", extra_config=own | remote | {"store_dirs": str(work / "1")}, **limits
        ) as down,
        EngineChild(model, work / "without", extra_config=own | {"store_dirs": str(work / "2")}, **limits) as without,
    ):
        engines = {DOWN: down, WITHOUT: without}
        for number in range(options.rounds + 1):
            taken = {}
            for place, name in enumerate(engines if number % 2 else reversed(engines)):
                engines[name].call("measure_remote:watch_steps")
                taken[name] = take_turn(
                    engines[name], make_prompts(2 * number + place, options.requests, 1000, VOCABULARY), 32
                )
                steps[name].append(engines[name].call("measure_remote:longest_step_s") if number else 0.0)
            if number:
                ratios.append(taken[WITHOUT].work_s / taken[DOWN].work_s)
                cpu.append(taken[DOWN].cpu_s / taken[WITHOUT].cpu_s)
    table = Table("", "median", "lowest to highest")
    for what, found in (("throughput, of no remote", ratios), ("processor time, of no remote", cpu)):
        table.add_row(what, f"{statistics.median(found):.3f}", f"{min(found):.3f} to {max(found):.3f}")
        record.add("down", what, "ratio", found)
    for name, found in steps.items():
        table.add_row(f"longest step, {name}", f"{1000 * max(found):.0f} ms", "")
        record.add("down", f"longest step, {name}", "ms", [1000 * max(found)])
    return table


PARTS = {"objects": measure_objects, "prompts": measure_prompts, "down": measure_down}


def main() -> int:
    """Measure what is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=16, help="of a turn of 'down'")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="of 'prompts', in tokens")
    add_json_option(parser)
    options = parser.parse_args()
    console = Console(highlight=False, width=130)
    WORK.mkdir(exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="remote-", dir=WORK))
    record = Record(work)
    for part in options.parts:
        (work / part).mkdir()
        console.print(PARTS[part](options, work / part, record))
    console.print(Machine.here(work).sentence, soft_wrap=True)
    record.write(options.json)
    shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
