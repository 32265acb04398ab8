# SPDX-License-Identifier: Apache-2.0
"""``kvdisk size``: what a model's KV takes, how much of it fits, and how long the drive lasts.

``Answer`` is what ``--json`` prints; its shape changes only with ``json_version``. Bytes are
integers; ``null`` is what was not asked for or does not apply.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from kvdisk import __version__
from kvdisk.assembly import memory_slots_in, unit_choice
from kvdisk.cli.indexes import read_homes
from kvdisk.cli.model_kv import ModelKv, read_model
from kvdisk.cli.output import (
    AsJson,
    make_lines,
    number,
    opening,
    plural,
    print_json,
    printable,
    refusal,
    report_console,
    share,
)
from kvdisk.cli.output import size as in_words
from kvdisk.config import Config, parse_bytes, parse_unit
from kvdisk.engine_store import nvme_layout_in
from kvdisk.errors import ConfigError
from kvdisk.geometry import AUTO, Geometry

DAY_S = 86400
_CONTEXT_TOKENS = 32768
MOST_RANKS = 1024
_MOST_BLOCK_TOKENS = 1 << 16
_MODEL_FIELDS = ("kind", "kv_heads", "head_elements", "mla", "dtype", "longest_tokens")
_GROUP_FIELDS = ("group", "window_tokens", "block_tokens", "payload_bytes", "slot_bytes")


_BlockSize = Annotated[
    int | None,
    typer.Option(metavar="TOKENS", min=1, max=_MOST_BLOCK_TOKENS, help="As vLLM's. Default: 16, with MLA 64."),
]
_Unit = Annotated[str, typer.Option(metavar="N|auto|off", help="Tokens of a unit; see the setting unit_tokens.")]
_Longest = Annotated[
    int | None, typer.Option("--max-model-len", metavar="TOKENS", min=1, help="As vLLM's. Default: the model's.")
]
_Prefill = Annotated[
    float | None,
    typer.Option(metavar="TOKENS", min=1, help="Computed in a second: what a remote store's link must carry."),
]

_Shrinks = Annotated[
    float | None,
    typer.Option(metavar="TIMES", min=1, help="How many times shorter remote_codec makes blocks; with --prefill."),
]

_DataParallel = Annotated[
    int, typer.Option("--dp", metavar="N", min=1, max=MOST_RANKS, help="Data-parallel ranks, engines each.")
]


@dataclass(frozen=True)
class Fit:
    """What fits into a tier. ``tokens``, ``blocks``: in all KV-cache groups.

    ``used_bytes``: payloads of so many tokens, on all ranks. The rest of ``capacity_bytes`` is
    headers, padding, index, and space that is too small for a whole segment or block.
    """

    capacity_bytes: int
    tokens: int
    blocks: int
    used_bytes: int
    conversations: int


@dataclass(frozen=True)
class Writes:
    """What is written in a day. ``measured_s``: the time of a store that was looked at; None where
    the rate was given. ``at_least``: it was measured, so blocks that were evicted since are
    missing.
    """

    bytes_per_day: int
    measured_s: int | None
    at_least: bool


@dataclass(frozen=True)
class Endurance:
    """How long drives last. ``bytes``: what all drives take. ``days``: how long they last, where
    the writes are known."""

    bytes: int
    days: float | None


@dataclass(frozen=True)
class Link:
    """A link to a remote store. ``bits_per_s``: the rate from which on loads bring tokens sooner
    than the GPU computes them. ``sent_bytes_per_day``: if all that is computed is sent once.
    ``shrinks``: how many times shorter ``remote_codec`` makes blocks; ``coded_...``: the same with
    it. null: it was not said."""

    prefill_tokens_per_s: float
    bits_per_s: int
    sent_bytes_per_day: int
    shrinks: float | None = None
    coded_bits_per_s: int | None = None
    coded_bytes_per_day: int | None = None


@dataclass
class Answer:
    """All that is shown.

    ``model``: kind, layers, kv_heads and head_elements (of a layer and token; MLA: one head), mla,
    dtype (of the KV), longest_tokens. ``token_bytes``: of one token on all ranks together, in GPU
    and CPU memory; ``_rank``: on one rank, of the largest stage; ``_drive``: on the drive, without
    headers and padding. ``pipeline``: layers of each stage. ``groups``: KV-cache groups, with the
    sizes of blocks on one rank. ``context_tokens``: of a conversation. ``notes``: sentences about
    what had to be assumed. ``data_parallel``: engines; ``cpu`` and ``nvme`` are those of each.
    """

    model: Mapping[str, object]
    tensor_parallel: int
    pipeline: Sequence[int]
    block_tokens: int
    token_bytes: int
    token_bytes_rank: int
    token_bytes_drive: int
    groups: Sequence[Mapping[str, int | None]]
    context_tokens: int
    cpu: Fit | None = None
    nvme: Fit | None = None
    writes: Writes | None = None
    endurance: Endurance | None = None
    link: Link | None = None
    data_parallel: int = 1
    notes: list[str] = field(default_factory=list)
    json_version: int = 3
    kvdisk_version: str = __version__


def size(
    model: Annotated[
        Path, typer.Option("--model", metavar="CONFIG", help="A model's directory, or its config.json.", readable=False)
    ],
    tp: Annotated[int, typer.Option("--tp", metavar="N", min=1, max=MOST_RANKS, help="Tensor-parallel size.")] = 1,
    pp: Annotated[
        str,
        typer.Option("--pp", metavar="N", help="Pipeline stages, or what VLLM_PP_LAYER_PARTITION says: 2, or 17,15."),
    ] = "1",
    dp: _DataParallel = 1,
    nvme: Annotated[str | None, typer.Option("--nvme", metavar="BYTES", help="The NVMe tier: 500GiB.")] = None,
    cpu: Annotated[str | None, typer.Option("--cpu", metavar="BYTES", help="The CPU tier, over all ranks.")] = None,
    context: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", min=1, help="Of a conversation; at most the model's, or 32,768."),
    ] = None,
    block_size: _BlockSize = None,
    dtype: Annotated[str | None, typer.Option(help="As vLLM's dtype, where that is not the model's.")] = None,
    kv_dtype: Annotated[str, typer.Option(help="As vLLM's kv_cache_dtype: auto, fp8, bfloat16 ...")] = "auto",
    unit_tokens: _Unit = AUTO,
    max_model_len: _Longest = None,
    drives: Annotated[
        int, typer.Option(metavar="N", min=1, max=MOST_RANKS, help="How many directories store_dirs has.")
    ] = 1,
    write_rate: Annotated[
        str | None,
        typer.Option(metavar="BYTES|DIR", help="Written in a day; or a store, to look at what it took."),
    ] = None,
    endurance: Annotated[
        str | None,
        typer.Option("--drive-endurance", metavar="BYTES", help="What the drives take before they wear out: 1.2PB."),
    ] = None,
    prefill: _Prefill = None,
    shrinks: _Shrinks = None,
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
        tokens = context or min(known.longest_tokens or _CONTEXT_TOKENS, _CONTEXT_TOKENS)
        stages = known.stages(pp)
        engine = _engine(cpu, nvme, unit_tokens)
        units = unit_choice(engine, max_model_len or known.longest_tokens or 0)
        geometry = known.geometry(tp, block_size, stages, units)
        filled, writes = known.filled(stages), _writes(write_rate)
        answer = _answer(known, geometry, stages, tokens)
        answer.cpu = fit_cpu(geometry, engine.cpu_bytes, tokens, filled) if cpu else None
        answer.nvme = fit_nvme(geometry, engine.nvme_bytes, drives, tokens, filled) if engine.nvme_bytes else None
        answer.writes, answer.endurance = writes, _endurance(endurance, writes) if endurance else None
        answer.link, answer.data_parallel = _link(answer, prefill, shrinks), dp
        if block_size is None:
            answer.notes.append(f"blocks of {geometry.hash_tokens} tokens are assumed; see --block-size")
    except ConfigError as error:
        sentence = str(error).replace("nvme_bytes", "--nvme").replace("cpu_bytes", "--cpu")  # as they are called here
        raise refusal(sentence.rstrip(".") + ".") from None
    print_json(answer) if as_json else _print(answer, known, report_console())


def _answer(model: ModelKv, geometry: Geometry, stages: Sequence[int], context_tokens: int) -> Answer:
    filled = model.filled(stages)
    return Answer(
        model={name: getattr(model, name) for name in _MODEL_FIELDS} | {"layers": len(model.windows)},
        tensor_parallel=geometry.rank_count // len(stages),
        pipeline=stages,
        block_tokens=geometry.hash_tokens,
        token_bytes=round(token_bytes(geometry, geometry.rank_count * filled)),
        token_bytes_rank=round(token_bytes(geometry, 1)),
        token_bytes_drive=round(token_bytes(geometry, geometry.shard_count * filled)),
        groups=[{name: getattr(group, name) for name in _GROUP_FIELDS} for group in geometry.groups],
        context_tokens=context_tokens,
        notes=list(model.notes),
    )


def _engine(cpu: str | None, nvme: str | None, unit_tokens: str) -> Config:
    """Return the settings that decide what is kept. Raises ConfigError."""
    return Config(
        cpu_bytes=parse_bytes("--cpu", cpu) if cpu else 0,
        nvme_bytes=parse_bytes("--nvme", nvme) if nvme else None,
        unit_tokens=parse_unit("--unit-tokens", unit_tokens),
    )


def _endurance(text: str, writes: Writes | None) -> Endurance:
    """Read what drives take, as makers write it: ``600TB``, ``1.2PBW``. Raises ConfigError."""
    stripped = text.strip().upper().removesuffix("W")
    taken = parse_bytes("--drive-endurance", stripped)
    return Endurance(taken, round(taken / writes.bytes_per_day, 1) if writes and writes.bytes_per_day else None)


def _link(answer: Answer, prefill: float | None, shrinks: float | None) -> Link | None:
    if prefill is None:
        if shrinks is not None:
            raise ConfigError("--shrinks needs --prefill.")
        return None
    loaded, sent = prefill * answer.token_bytes * 8, prefill * answer.token_bytes_drive * DAY_S
    coded = (None, None) if shrinks is None else (round(loaded / shrinks), round(sent / shrinks))
    return Link(prefill, round(loaded), round(sent), shrinks, *coded)


def _writes(text: str | None) -> Writes | None:
    """Return what was measured in a store, or what was given."""
    if text is None:
        return None
    if not Path(text).is_dir() and "/" not in text:
        return Writes(parse_bytes("--write-rate", text), None, at_least=False)
    with opening([Path(text)]) as paths:
        return measure_writes(paths)


# -- what fits, and what was written -----------------------------------------------------------


def token_bytes(geometry: Geometry, parts: float) -> float:
    """Return the bytes of KV of one token on ``parts`` parts: ranks in memory, shards on the drive.
    A fraction stands for parts that have less than the largest."""
    return sum(group.payload_bytes / group.tokens_each for group in geometry.groups) * parts


def fit_cpu(geometry: Geometry, cpu_bytes: int, context_tokens: int = _CONTEXT_TOKENS, filled: float = 1.0) -> Fit:
    """Return what fits into the CPU tier, over all ranks. ``filled``: the share of all payloads
    that is KV. Raises ConfigError where nothing fits."""
    return _fit(geometry, memory_slots_in(cpu_bytes, geometry), cpu_bytes, geometry.rank_count * filled, context_tokens)


def fit_nvme(
    geometry: Geometry,
    nvme_bytes: int,
    drive_count: int,
    context_tokens: int = _CONTEXT_TOKENS,
    filled: float = 1.0,
) -> Fit:
    """Return what fits into the NVMe tier. ``filled``: the share of all payloads that is KV. Raises
    ConfigError where nothing fits."""
    layout = nvme_layout_in(nvme_bytes, Config().segment_bytes, geometry, drive_count)
    parts = geometry.shard_count * filled
    return _fit(geometry, layout.class_slots(geometry), nvme_bytes, parts, context_tokens)


def _fit(geometry: Geometry, slots: Sequence[int], capacity_bytes: int, parts: float, context_tokens: int) -> Fit:
    """Return what fits into ``slots``, by size class."""
    tokens = geometry.tokens_in(slots)
    blocks = sum(tokens // group.tokens_each for group in geometry.groups)
    used_bytes = round(tokens * token_bytes(geometry, parts))
    return Fit(capacity_bytes, tokens, blocks, used_bytes, tokens // context_tokens)


def measure_writes(directories: Sequence[Path]) -> Writes:
    """Return what a store's engines wrote in the last 24 hours, or since its first engine store was
    made. It is a lower bound, since blocks that were evicted do not count.

    Raises ConfigError where nothing was written, and as ``list_homes``.
    """
    now_s = began_s = int(time.time())
    written = 0
    for home in read_homes(directories):
        began_s = min(began_s, home.summary.record.created_s if home.summary.record else now_s)
        if home.blocks is not None:
            stored_s = home.blocks.columns.stored_s.astype(np.int64)
            written += int(home.blocks.slot_bytes[(now_s - DAY_S <= stored_s) & (stored_s <= now_s)].sum())
    if not written:
        raise ConfigError(f"nothing was written to {directories[0]} in the last 24 hours, as far as it still holds it.")
    seconds = min(DAY_S, max(1, now_s - began_s))
    return Writes(round(written * DAY_S / seconds), seconds, at_least=True)


# -- for people --------------------------------------------------------------------------------


def _print(answer: Answer, model: ModelKv, console: Console) -> None:
    lines, ranks = make_lines(), answer.tensor_parallel * len(answer.pipeline)
    lines.add_row("Model", printable(_described(model)))
    each = in_words(answer.token_bytes_rank)
    most = "" if len(set(answer.pipeline)) == 1 else "at most "
    of_ranks = f", {most}{each} on each of {ranks} ranks" if ranks > 1 else ""
    lines.add_row("KV", f"{in_words(answer.token_bytes)} a token{of_ranks}")
    if answer.token_bytes_drive != answer.token_bytes:
        lines.add_row("", f"the same on every rank: {each} a token on the drive")
    for at, group in enumerate(answer.groups):
        window = "full attention" if group["window_tokens"] is None else f"window of {number(group['window_tokens'])}"
        payload = f"{in_words(group['payload_bytes'])} in a slot of {in_words(group['slot_bytes'])}"
        lines.add_row("" if at else "Blocks", f"{group['block_tokens']} tokens, {window}: {payload} on each rank")
    if len(answer.pipeline) > 1:
        lines.add_row("Stages", f"{len(answer.pipeline)}, of {', '.join(map(str, answer.pipeline))} layers")
    long = in_words(answer.token_bytes * answer.context_tokens)
    lines.add_row("Conversation", f"{number(answer.context_tokens)} tokens, {long}")
    for name, fit in (("CPU", answer.cpu), ("NVMe", answer.nvme)):
        if fit is not None:
            filled = f" (payload {share(fit.used_bytes / fit.capacity_bytes)})" if fit.capacity_bytes else ""
            holds = f"{number(fit.tokens)} tokens in {plural(fit.blocks, 'block')}"
            whole = plural(fit.conversations, "conversation")
            lines.add_row(name, f"{in_words(fit.capacity_bytes)}{filled}: {holds}, {whole}")
            if answer.data_parallel > 1:
                together = in_words(fit.capacity_bytes * answer.data_parallel)
                lines.add_row("", f"each of {answer.data_parallel} engines has so much: {together} together")
    if answer.writes is not None:
        _add_wear(lines, answer.writes, answer.endurance)
    if answer.link is not None:
        computed = f"{answer.link.prefill_tokens_per_s:,.0f} computed tokens/s"
        lines.add_row("Link", f"{answer.link.bits_per_s / 1e9:,.1f} Gb/s, for loads as fast as {computed}")
        lines.add_row("", f"{in_words(answer.link.sent_bytes_per_day)} a day, where all of that is sent")
        if answer.link.coded_bits_per_s is not None and answer.link.coded_bytes_per_day is not None:
            less = (
                f"{answer.link.coded_bits_per_s / 1e9:,.1f} Gb/s and {in_words(answer.link.coded_bytes_per_day)} a day"
            )
            lines.add_row("", f"{less}, where remote_codec makes it {answer.link.shrinks:g} times shorter")
    console.print(lines)
    for note in answer.notes:
        console.print(f"  · {printable(note)}", soft_wrap=True, style="dim")


def _described(model: ModelKv) -> str:
    sliding = sum(window is not None for window in model.windows)
    windows = f" ({sliding} with a sliding window)" if sliding else ""
    heads = f"{plural(model.kv_heads, 'KV head')} of {model.head_elements // 2}"
    if model.mla:
        heads = f"MLA of {model.head_elements} elements"
    return f"{model.kind}: {plural(len(model.windows), 'layer')}{windows}, {heads}, {model.dtype}"


def _add_wear(lines: Table, writes: Writes, endurance: Endurance | None) -> None:
    how = at_most = ""
    if writes.measured_s is not None:
        how = f", measured over {writes.measured_s / 3600:.1f} h; at least, since what was evicted is not counted"
        at_most = "at most "
    lines.add_row("Writes", f"{in_words(writes.bytes_per_day)} a day{how}")
    if endurance is not None and endurance.days is not None:
        years = f" ({endurance.days / 365:.1f} years)" if endurance.days >= 365 else ""
        rest = "without what else is written to the drive"
        lines.add_row("Wear-out", f"after {at_most}{number(int(endurance.days))} days{years}, {rest}")
