# SPDX-License-Identifier: Apache-2.0
"""``kvdisk bench``: whether a drive is fast enough for a model and a GPU.

The mover is not in it. ``Bench`` is what ``--json`` prints; its shape changes only with
``json_version``. More of a drive: ``tools/bench_tiers.py``.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from kvdisk.cli.model_kv import read_model
from kvdisk.cli.output import AsJson, Exit, make_lines, print_json, printable, refusal, report_console, size, speed
from kvdisk.device.base import Buffer, Device, Op, Transfer
from kvdisk.device.paths import fsync, try_lock
from kvdisk.device.posix import PosixDevice
from kvdisk.device.probe import FILE_BYTES, DeviceTimeout, nameless_file, on_trial, probe
from kvdisk.errors import ConfigError, DeviceError
from kvdisk.geometry import ALIGNMENT, Geometry
from kvdisk.worker.arena import Arena

JSON_VERSION = 4
LEFT_FREE_BYTES = 1 << 30
"""Bytes that a run leaves free on the file system; otherwise it does not begin."""
SILENT_S = 30.0
"""Seconds without an answer after which a drive is measured no further."""
RUN_BYTES = 8 << 20
"""Bytes of neighbouring slots that a worker moves at once."""
ROUNDS = 3
BLOCK_BYTES = 2 << 20
"""Bytes of a block where no model is named."""


@dataclass(frozen=True)
class Bench:
    """What a drive reached, in bytes a second, as medians. Figures of two runs are not comparable.

    ``device``: what an engine would choose, ``direct``: with O_DIRECT or without (null: not known),
    and ``why``, in words. ``block_bytes``: of a slot, a block with its header. ``read``, ``write``:
    of single blocks. ``run_read``: of neighbours, up to 8 MiB. ``token_bytes``: of a token in
    slots, on all ranks. ``tokens_per_s``: loaded as single blocks. Both are null without a model.
    ``prefill_tokens_per_s``: as it was given. ``verdict``: a sentence.
    """

    path: Path
    device: str
    direct: bool | None
    why: str
    block_bytes: int
    read: float
    run_read: float
    write: float
    token_bytes: int | None
    tokens_per_s: float | None
    prefill_tokens_per_s: float | None
    verdict: str
    json_version: int = JSON_VERSION


def bench(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory on the drive to measure.")],
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="CONFIG", help="A model's directory, or its config.json.", readable=False),
    ] = None,
    tp: Annotated[int, typer.Option("--tp", metavar="N", min=1, max=1024, help="Tensor-parallel size.")] = 1,
    prefill: Annotated[
        float | None, typer.Option(metavar="N", min=1, help="Prompt tokens that the GPU computes in a second.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether the drive under DIR is fast enough for a model and a GPU.

    It is, where it loads a prompt sooner than the GPU computes it. How fast that is vLLM logs as
    "Avg prompt throughput" while it computes prompts. Measures for some seconds, on a file without
    a name, of which nothing is left. Figures of two runs are not comparable: a drive's speed
    changes from one to the next.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  measured

    [cyan]1[/cyan]  the drive failed

    [cyan]2[/cyan]  nothing was measured: wrong usage, no room, no permission
    """
    try:
        geometry = None if model is None else read_model(model).geometry(tp)
        found = measure(directory, geometry, prefill)
    except ConfigError as error:
        raise refusal(str(error)) from None
    except DeviceError as error:
        raise refusal(f"the drive failed: {error}", Exit.WRONG) from None
    if as_json:
        print_json(found)
    else:
        _print(found)


def measure(directory: Path, geometry: Geometry | None, prefill: float | None) -> Bench:
    """Measure the drive. Raises ConfigError where there is no room or no permission, DeviceError
    where the drive failed."""
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory.")
    status = os.statvfs(directory)
    free_bytes = status.f_bavail * status.f_frsize
    if free_bytes - FILE_BYTES < LEFT_FREE_BYTES:
        raise ConfigError(
            f"{directory} has {size(free_bytes)} free; this run needs {size(FILE_BYTES)} and leaves"
            f" {size(LEFT_FREE_BYTES)} free."
        )
    try:
        with nameless_file(directory, ALIGNMENT) as (fd, _):
            try_lock(fd, fcntl.LOCK_EX)
            fsync(fd)
    except OSError as error:
        raise ConfigError(f"cannot write in {directory}: {error.strerror}.") from None
    found = probe(directory, of_store=False)
    block_bytes = max(geometry.slot_sizes) if geometry else BLOCK_BYTES
    try:
        read, run_read, write = measure_drive(directory, min(block_bytes, RUN_BYTES), found.kernel_queue)
    except DeviceTimeout:
        raise DeviceError(errno.ETIMEDOUT, f"nothing was heard of it for {SILENT_S:g} s") from None
    except OSError as error:
        raise DeviceError(error.errno or errno.EIO, "the drive that is measured") from error
    token_bytes = tokens_per_s = None
    if geometry is not None:
        in_slots = sum(group.slot_bytes / group.block_tokens for group in geometry.groups)
        token_bytes = round(in_slots * geometry.shard_count)
        tokens_per_s = read / token_bytes
    verdict = _verdict(tokens_per_s, prefill)
    speeds = (block_bytes, read, run_read, write)
    return Bench(directory, found.name, found.direct, found.why, *speeds, token_bytes, tokens_per_s, prefill, verdict)


def _verdict(tokens_per_s: float | None, prefill: float | None) -> str:
    """Return the verdict: the answer, or what is still to be given."""
    if tokens_per_s is None:
        return "name a model to see how many tokens a second that is: --model CONFIG"
    if prefill is None:
        return f"worth it where the GPU computes less than {tokens_per_s:,.0f} tokens/s; --prefill N compares"
    if tokens_per_s >= prefill:
        return f"fast enough: it loads a prompt {tokens_per_s / prefill:.1f} times as fast as the GPU computes it"
    return f"too slow: the GPU computes a prompt {prefill / tokens_per_s:.1f} times as fast as it loads it"


def measure_drive(directory: Path, block_bytes: int, kernel_queue: bool = True) -> tuple[float, float, float]:
    """Move an unnamed file in ``directory`` in blocks and in runs, by the kernel's queue or by
    threads. Return the bytes per second of reads, of reads in runs, and of writes. Raises
    DeviceError, DeviceTimeout, OSError."""
    memory = Arena([RUN_BYTES], [FILE_BYTES // RUN_BYTES], pin=False).memory  # as an engine's: it has huge pages
    memory[:] = random.randbytes(4096) * (FILE_BYTES // 4096)  # noqa: S311 - no secret
    device = PosixDevice(kernel_queue=kernel_queue)
    with nameless_file(directory, FILE_BYTES) as (fd, _), on_trial(device, fd, memory):

        def measured(op: Op, each_bytes: int) -> float:
            return statistics.median(
                move_all(device, op, shuffled(fd, memory, each_bytes, RUN_BYTES)) for _ in range(ROUNDS)
            )

        write = measured(Op.WRITE, block_bytes)
        return measured(Op.READ, block_bytes), measured(Op.READ, RUN_BYTES), write


def shuffled(fd: int, memory: Buffer, size: int, batch_bytes: int) -> list[list[Transfer]]:
    """Return transfers of ``size`` bytes at shuffled places, in batches as a worker submits
    them."""
    places = list(range(0, len(memory) - size + 1, size))
    transfers = [
        Transfer(fd, place, (memory[at : at + size],))
        for at, place in zip(places, random.sample(places, len(places)), strict=True)
    ]
    most = max(1, batch_bytes // size)
    return [transfers[first : first + most] for first in range(0, len(transfers), most)]


def move_all(device: Device, op: Op, batches: Sequence[Sequence[Transfer]]) -> float:
    """Move all batches; return bytes per second. Raises DeviceError, DeviceTimeout."""
    began_s = time.monotonic()
    waiting = {device.submit(op, batch) for batch in batches}
    failed: list[int] = []
    while waiting:
        ended = device.poll(SILENT_S)
        if not ended:
            raise DeviceTimeout
        for outcome in ended:
            waiting.discard(outcome.ticket)
            failed += outcome.errors.values()
    took_s = time.monotonic() - began_s
    if failed:
        raise DeviceError(failed[0], "the drive that is measured")
    return sum(transfer.buffers[0].nbytes for batch in batches for transfer in batch) / max(took_s, 1e-9)


# -- for people --------------------------------------------------------------------------------


def _print(found: Bench) -> None:
    lines, block = make_lines(), size(found.block_bytes)
    lines.add_row("Drive", f"{printable(found.path)}, device {found.device}: {found.why}")
    lines.add_row("Reads", f"{speed(found.read)} in blocks of {block}, {speed(found.run_read)} where they lie in a row")
    lines.add_row("Writes", speed(found.write))
    if found.token_bytes is not None and found.tokens_per_s is not None:
        lines.add_row("Model", f"{size(found.token_bytes)} a token: {found.tokens_per_s:,.0f} tokens/s loaded")
    if found.prefill_tokens_per_s is not None:
        lines.add_row("GPU", f"{found.prefill_tokens_per_s:,.0f} tokens/s computed")
    lines.add_row("Verdict", Text(found.verdict, "bold"))
    report_console().print(lines)
