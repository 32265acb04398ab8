# SPDX-License-Identifier: Apache-2.0
"""``kvdisk size``: what a model's KV takes, how much of it fits, and how long the drive lasts.

``Answer`` is what ``--json`` prints; its shape changes only with ``json_version``. Bytes are
integers; ``null`` is what was not asked for or does not apply.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from kvdisk import __version__
from kvdisk.blocks import group_of
from kvdisk.cli.indexes import Records
from kvdisk.cli.model_kv import ModelKv, read_model
from kvdisk.cli.output import (
    AsJson,
    make_lines,
    number,
    parse_size,
    plural,
    print_json,
    printable,
    refusal,
    refusing,
    report_console,
    share,
    store_paths,
)
from kvdisk.cli.output import size as in_words
from kvdisk.config import Config
from kvdisk.device.cap import HOME_OVERHEAD_BYTES, uses_charge_bytes
from kvdisk.device.listing import list_homes
from kvdisk.device.rebuild import HomeShape
from kvdisk.errors import ConfigError, CorruptRecord
from kvdisk.geometry import Geometry
from kvdisk.index.lmdb_index import map_bytes_for
from kvdisk.index.reader_process import read_indexes
from kvdisk.manager.segments import NvmeLayout

DAY_S = 86400
_BLOCK_TOKENS, _MLA_BLOCK_TOKENS = 16, 64
_CONTEXT_TOKENS = 32768
_MOST_RANKS = 1024
_MODEL_FIELDS = ("kind", "kv_heads", "head_elements", "mla", "dtype", "longest_tokens")
_GROUP_FIELDS = ("group", "window_tokens", "block_tokens", "payload_bytes", "slot_bytes")


@dataclass(frozen=True)
class Fit:
    """What fits into a tier. ``tokens``: with the KV of all their KV-cache groups.

    ``blocks``: of all groups together. ``used_bytes``: payloads of so many tokens, on all ranks;
    the rest of ``capacity_bytes`` is headers, padding, index, and what no whole segment or block
    fits into.
    """

    capacity_bytes: int
    tokens: int
    blocks: int
    used_bytes: int
    conversations: int


@dataclass(frozen=True)
class Writes:
    """What is written in a day.

    ``measured_s``: the time looked back on in a store; None: the rate was given.
    ``at_least``: measured, so that what has left in the meantime does not count.
    """

    bytes_per_day: int
    measured_s: int | None
    at_least: bool


@dataclass(frozen=True)
class Endurance:
    """``bytes``: that all drives take. ``days``: how long they last, where the writes are known."""

    bytes: int
    days: float | None


@dataclass(frozen=True)
class Answer:
    """All that is shown.

    ``model``: kind, layers, kv_heads and head_elements (of a layer and token; MLA: one head), mla,
    dtype (of the KV), longest_tokens. ``token_bytes``: of one token on all ranks together, in GPU
    and CPU memory; ``_rank``: on one rank; ``_drive``: on the drive, without headers and padding.
    ``groups``: KV-cache groups, sizes of blocks on one rank. ``context_tokens``: of a
    conversation. ``notes``: sentences about what had to be assumed.
    """

    model: Mapping[str, object]
    tensor_parallel: int
    block_tokens: int
    token_bytes: int
    token_bytes_rank: int
    token_bytes_drive: int
    groups: Sequence[Mapping[str, int | None]]
    context_tokens: int
    cpu: Fit | None
    nvme: Fit | None
    writes: Writes | None
    endurance: Endurance | None
    notes: tuple[str, ...]
    json_version: int = 1
    kvdisk_version: str = __version__


Model = Annotated[
    Path, typer.Option("--model", metavar="CONFIG", help="A model's directory, or its config.json.", readable=False)
]
Ranks = Annotated[int, typer.Option("--tp", metavar="N", help="Tensor-parallel size.")]
NvmeBytes = Annotated[str | None, typer.Option("--nvme", metavar="BYTES", help="The NVMe tier: 500GiB.")]
CpuBytes = Annotated[str | None, typer.Option("--cpu", metavar="BYTES", help="The CPU tier, over all ranks.")]
Context = Annotated[
    int | None, typer.Option("--context", metavar="TOKENS", help="Of a conversation; at most the model's, or 32,768.")
]
BlockSize = Annotated[
    int | None, typer.Option("--block-size", metavar="TOKENS", help="As vLLM is told: 16, with MLA 64.")
]
Dtype = Annotated[str | None, typer.Option("--dtype", help="As vLLM is told, where that is not the model's.")]
KvDtype = Annotated[str, typer.Option("--kv-dtype", help="As vLLM's kv_cache_dtype: auto, fp8, bfloat16 ...")]
Drives = Annotated[int, typer.Option("--drives", metavar="N", help="How many directories store_dirs has.")]
Rate = Annotated[
    str | None,
    typer.Option("--write-rate", metavar="BYTES|DIR", help="Written in a day; or a store, to look at what it took."),
]
EnduranceBytes = Annotated[
    str | None,
    typer.Option("--drive-endurance", metavar="BYTES", help="What the drives take before they wear out: 1.2PB."),
]


def size(
    model: Model,
    tp: Ranks = 1,
    nvme: NvmeBytes = None,
    cpu: CpuBytes = None,
    context: Context = None,
    block_size: BlockSize = None,
    dtype: Dtype = None,
    kv_dtype: KvDtype = "auto",
    drives: Drives = 1,
    write_rate: Rate = None,
    endurance: EnduranceBytes = None,
    as_json: AsJson = False,
) -> None:
    """Say what a token's KV takes, what fits, and how long the drive lasts.

    Counts as an engine does: blocks by KV-cache group, slot headers and
    padding, the index, whole segments. Reads the model's configuration alone;
    a model whose KV is not only attention is refused.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  the figures are shown

    [cyan]2[/cyan]  they are not: no such configuration, a kind of model that is
    not counted, too few bytes, or wrong usage
    """
    try:
        known = read_model(model, dtype, kv_dtype)
        block_tokens = block_size if block_size is not None else _MLA_BLOCK_TOKENS if known.mla else _BLOCK_TOKENS
        longest = min(known.longest_tokens or _CONTEXT_TOKENS, _CONTEXT_TOKENS)
        tokens = longest if context is None else context
        for name, value, most in (
            ("--tp", tp, _MOST_RANKS),
            ("--block-size", block_tokens, 1 << 16),
            ("--drives", drives, _MOST_RANKS),
            ("--context", tokens, 1 << 40),
        ):
            if not 1 <= value <= most:
                raise ConfigError(f"{name} must be 1 to {most:,}, not {value}.")
        geometry = known.geometry(tp, block_tokens)
        writes = _writes(write_rate)
        wear = None
        if endurance is not None:
            taken = parse_endurance(endurance)
            wear = Endurance(taken, round(taken / writes.bytes_per_day, 1) if writes and writes.bytes_per_day else None)
        answer = Answer(
            model={name: getattr(known, name) for name in _MODEL_FIELDS} | {"layers": len(known.windows)},
            tensor_parallel=tp,
            block_tokens=geometry.hash_tokens,
            token_bytes=round(token_bytes(geometry, geometry.rank_count)),
            token_bytes_rank=round(token_bytes(geometry, 1)),
            token_bytes_drive=round(token_bytes(geometry, geometry.part_count)),
            groups=[{name: getattr(group, name) for name in _GROUP_FIELDS} for group in geometry.groups],
            context_tokens=tokens,
            cpu=None if cpu is None else fit_cpu(geometry, parse_size("--cpu", cpu), tokens),
            nvme=None if nvme is None else fit_nvme(geometry, parse_size("--nvme", nvme), drives, tokens),
            writes=writes,
            endurance=wear,
            notes=(*known.notes, *_block_note(block_size, block_tokens)),
        )
    except ConfigError as error:
        sentence = str(error).replace("nvme_bytes", "--nvme").replace("cpu_bytes", "--cpu")  # as they are called here
        raise refusal(sentence.rstrip(".") + ".") from None
    if as_json:
        print_json(answer)
    else:
        _print(answer, known, report_console())


def parse_endurance(text: str) -> int:
    """Read what drives take, as makers write it: ``600TB``, ``1.2PBW``. Raises ConfigError."""
    stripped = text.strip().upper().removesuffix("W")
    if stripped.endswith("PB"):
        stripped, factor = stripped.removesuffix("PB") + "TB", 1000
    else:
        factor = 1
    return parse_size("--drive-endurance", stripped) * factor


def _block_note(given: int | None, block_tokens: int) -> list[str]:
    return [] if given else [f"blocks of {block_tokens} tokens are assumed; see --block-size"]


def _writes(text: str | None) -> Writes | None:
    """Return what was measured in a store, or what was given."""
    if text is None:
        return None
    if not ((path := Path(text)).is_dir() or "/" in text):
        return Writes(parse_size("--write-rate", text), None, at_least=False)
    paths = store_paths([path])
    with refusing(paths):
        found = measure_writes(paths)
    if found is None:
        raise ConfigError(f"nothing was written to {paths[0]} in the last 24 hours, as far as it still holds it.")
    return found


# -- what fits, and what was written -----------------------------------------------------------


def token_bytes(geometry: Geometry, parts: int) -> float:
    """Return the bytes of KV of one token on so many parts: ranks in memory, parts on the drive."""
    return sum(group.payload_bytes / group.block_tokens for group in geometry.groups) * parts


def fit_cpu(geometry: Geometry, cpu_bytes: int, context_tokens: int = _CONTEXT_TOKENS) -> Fit:
    """Return what fits into the CPU tier, over all ranks. Raises ConfigError where nothing does."""
    slots = geometry.cpu_slots(cpu_bytes)
    if cpu_bytes and not all(slots):
        largest = max(geometry.slot_sizes) * geometry.rank_count
        raise ConfigError(f"cpu_bytes {cpu_bytes} holds no block of each kind; one needs up to {largest} bytes.")
    return _fit(geometry, slots, cpu_bytes, geometry.rank_count, context_tokens)


def fit_nvme(geometry: Geometry, nvme_bytes: int, drive_count: int, context_tokens: int = _CONTEXT_TOKENS) -> Fit:
    """Return what fits into the NVMe tier. Raises ConfigError where nothing does."""
    budget_bytes = max(0, nvme_bytes - HOME_OVERHEAD_BYTES)
    segment_bytes = Config().segment_bytes
    layout = NvmeLayout.make(budget_bytes, segment_bytes, geometry, map_bytes_for, uses_charge_bytes, drive_count)
    return _fit(geometry, layout.class_slots(geometry), nvme_bytes, geometry.part_count, context_tokens)


def _fit(geometry: Geometry, slots: Sequence[int], capacity_bytes: int, parts: int, context_tokens: int) -> Fit:
    """Count tokens all of whose blocks have slots. ``slots``: by size class."""
    per_token = [0.0] * len(slots)
    for group, size_class in zip(geometry.groups, geometry.size_classes, strict=True):
        per_token[size_class] += 1 / group.block_tokens
    tokens = int(min(count / needed for count, needed in zip(slots, per_token, strict=True)))
    tokens -= tokens % geometry.step_tokens
    blocks = sum(tokens // group.block_tokens for group in geometry.groups)
    used_bytes = round(tokens * token_bytes(geometry, parts))
    return Fit(capacity_bytes, tokens, blocks, used_bytes, tokens // context_tokens)


def measure_writes(directories: Sequence[Path], now_s: int | None = None) -> Writes | None:
    """Return what a store's engines wrote in the last 24 hours, from when its blocks were stored.

    None: nothing. At least so much: blocks that have left in the meantime do not count. Of a store
    that is younger the time since its first home was made counts. Raises as ``list_homes``.
    """
    now_s = int(time.time()) if now_s is None else now_s
    summaries = [summary for summary in list_homes(directories) if summary.record is not None]
    written = 0
    began_s = now_s
    for summary, index in zip(summaries, read_indexes([one.index_path for one in summaries]), strict=True):
        assert summary.record is not None
        began_s = min(began_s, summary.record.created_s)
        try:
            shape = HomeShape.of(summary.record.fingerprint, summary.record.description)
        except CorruptRecord:
            continue
        blocks = Records(index.blocks).columns
        stored_s = blocks.stored_s.astype(np.int64)
        for row in np.flatnonzero((now_s - DAY_S <= stored_s) & (stored_s <= now_s)).tolist():
            if (group := group_of(blocks.keys[row])) < len(shape.groups):
                written += shape.groups[group].slot_bytes * shape.rank_count
    seconds = min(DAY_S, max(1, now_s - began_s))
    return Writes(round(written * DAY_S / seconds), seconds, at_least=True) if written else None


# -- for people --------------------------------------------------------------------------------


def _print(answer: Answer, model: ModelKv, console: Console) -> None:
    lines, ranks = make_lines(), answer.tensor_parallel
    lines.add_row("Model", printable(_described(model)))
    each = in_words(answer.token_bytes_rank)
    of_ranks = f", {each} on each of {ranks} ranks" if ranks > 1 else ""
    lines.add_row("KV", f"{in_words(answer.token_bytes)} a token{of_ranks}")
    if answer.token_bytes_drive != answer.token_bytes:
        lines.add_row("", f"the same on every rank: {each} a token on the drive")
    for at, group in enumerate(answer.groups):
        window = "full attention" if group["window_tokens"] is None else f"window of {number(group['window_tokens'])}"
        payload = f"{in_words(group['payload_bytes'])} in a slot of {in_words(group['slot_bytes'])}"
        lines.add_row("" if at else "Blocks", f"{group['block_tokens']} tokens, {window}: {payload} on each rank")
    long = in_words(answer.token_bytes * answer.context_tokens)
    lines.add_row("Conversation", f"{number(answer.context_tokens)} tokens, {long}")
    console.print(lines)
    tiers = [(name, fit) for name, fit in (("CPU", answer.cpu), ("NVMe", answer.nvme)) if fit is not None]
    if tiers:
        console.print(_tiers(tiers))
    if answer.writes is not None:
        _print_wear(answer.writes, answer.endurance, console)
    for note in answer.notes:
        console.print(f"  · {printable(note)}", soft_wrap=True, style="dim")


def _described(model: ModelKv) -> str:
    layers = plural(len(model.windows), "layer")
    sliding = sum(window is not None for window in model.windows)
    windows = f" ({sliding} with a sliding window)" if sliding else ""
    heads = (
        f"MLA of {model.head_elements} elements"
        if model.mla
        else f"{plural(model.kv_heads, 'KV head')} of {model.head_elements // 2}"
    )
    return f"{model.kind}: {layers}{windows}, {heads}, {model.dtype}"


def _tiers(tiers: list[tuple[str, Fit]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("\nTier", style="bold")
    for header in ("\nBytes", "\nTokens", "\nBlocks", "Conver-\nsations", "\nPayload"):
        table.add_column(header, justify="right", no_wrap=True)
    for name, fit in tiers:
        table.add_row(
            name,
            in_words(fit.capacity_bytes),
            number(fit.tokens),
            number(fit.blocks),
            number(fit.conversations),
            share(fit.used_bytes / fit.capacity_bytes) if fit.capacity_bytes else "?",
        )
    return table


def _print_wear(writes: Writes, endurance: Endurance | None, console: Console) -> None:
    how = at_most = ""
    if writes.measured_s is not None:
        how = f", measured over {writes.measured_s / 3600:.1f} h; at least, since what has left is not counted"
        at_most = "at most "
    lines = make_lines()
    lines.add_row("\nWrites", f"\n{in_words(writes.bytes_per_day)} a day{how}")
    if endurance is not None and endurance.days is not None:
        years = f" ({endurance.days / 365:.1f} years)" if endurance.days >= 365 else ""
        rest = "without what else is written to the drive"
        lines.add_row("Wear-out", f"after {at_most}{number(int(endurance.days))} days{years}, {rest}")
    console.print(lines)
