# SPDX-License-Identifier: Apache-2.0
"""``kvdisk size``: what a model's KV takes, how much of it fits, and how long the drive lasts.

What ``--json`` prints, one object whose shape changes only with ``json_version``; bytes are integers, ``null`` is what
was not asked for or does not apply::

    json_version       1
    kvdisk_version     of the command
    model              kind, layers, kv_heads and head_elements (of a layer and token; MLA: one head), mla, dtype (of
                       the KV), longest_tokens
    tensor_parallel, block_tokens
    token_bytes        of one token on all ranks together, in GPU and CPU memory
    token_bytes_rank   of one token on one rank
    token_bytes_drive  of one token on the drive, without headers and padding
    groups[]           KV-cache groups: group, window_tokens, block_tokens, payload_bytes, slot_bytes (on one rank)
    context_tokens     of a conversation
    cpu, nvme          capacity_bytes, tokens, blocks (of all groups), used_bytes (payloads), conversations
    writes             bytes_per_day, measured_s (the time looked back on; null: given), at_least
    endurance          bytes (that the drives take), days
    notes              sentences about what had to be assumed
"""

from __future__ import annotations

import json
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from kvdisk import __version__
from kvdisk.cli.amounts import parse_size
from kvdisk.cli.model_kv import ModelKv, read_model
from kvdisk.cli.refusal import NOTHING_DONE, refusal, refusing, store_paths
from kvdisk.cli.sizing import Fit, WriteRate, fit_cpu, fit_nvme, measure_writes, token_bytes
from kvdisk.cli.terminal import report_console
from kvdisk.cli.wording import number, plural, printable, share
from kvdisk.cli.wording import size as in_words
from kvdisk.errors import ConfigError
from kvdisk.geometry import Geometry

JSON_VERSION = 1
_BLOCK_TOKENS, _MLA_BLOCK_TOKENS = 16, 64
_CONTEXT_TOKENS = 32768
_MOST_RANKS = 1024


class Exit(IntEnum):
    """Exit codes."""

    SHOWN = 0
    REFUSED = NOTHING_DONE


class Answer(NamedTuple):
    """All that is shown. ``endurance_bytes``: of all drives together."""

    model: ModelKv
    geometry: Geometry
    context_tokens: int
    cpu: Fit | None
    nvme: Fit | None
    writes: WriteRate | None
    given_bytes_per_day: int | None
    endurance_bytes: int | None
    notes: tuple[str, ...]

    @property
    def bytes_per_day(self) -> int | None:
        """What is written in a day, given or measured."""
        return self.writes.bytes_per_day if self.writes else self.given_bytes_per_day

    @property
    def days(self) -> float | None:
        """How long the drives last."""
        if self.endurance_bytes is None or not self.bytes_per_day:
            return None
        return self.endurance_bytes / self.bytes_per_day


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
Endurance = Annotated[
    str | None,
    typer.Option("--drive-endurance", metavar="BYTES", help="What the drives take before they wear out: 1.2PB."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


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
    endurance: Endurance = None,
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
        for name, value, most in (
            ("--tp", tp, _MOST_RANKS),
            ("--block-size", block_tokens, 1 << 16),
            ("--drives", drives, _MOST_RANKS),
            ("--context", longest if context is None else context, 1 << 40),
        ):
            if not 1 <= value <= most:
                raise ConfigError(f"{name} must be 1 to {most:,}, not {value}.")
        geometry = known.geometry(tp, block_tokens)
        writes, given = _writes(write_rate)
        answer = Answer(
            known,
            geometry,
            longest if context is None else context,
            None if cpu is None else fit_cpu(geometry, parse_size("--cpu", cpu)),
            None if nvme is None else fit_nvme(geometry, parse_size("--nvme", nvme), drives),
            writes,
            given,
            None if endurance is None else parse_endurance(endurance),
            (*known.notes, *_block_note(block_size, block_tokens)),
        )
    except ConfigError as error:
        raise refusal(_as_option(str(error))) from None
    if as_json:
        typer.echo(json.dumps(answer_as_json(answer), indent=2))
    else:
        _print(answer, report_console())
    raise typer.Exit(Exit.SHOWN)


def _as_option(sentence: str) -> str:
    """Name what an engine's setting is called here."""
    return sentence.replace("nvme_bytes", "--nvme").replace("cpu_bytes", "--cpu").rstrip(".") + "."


def parse_endurance(text: str) -> int:
    """Read what drives take, as their makers write it: ``600TB``, ``1.2PB``, ``600TBW``. Raises ConfigError."""
    stripped = text.strip().upper().removesuffix("W")
    if stripped.endswith("PB"):
        stripped, factor = stripped.removesuffix("PB") + "TB", 1000
    else:
        factor = 1
    return parse_size("--drive-endurance", stripped) * factor


def _block_note(given: int | None, block_tokens: int) -> list[str]:
    return [] if given else [f"blocks of {block_tokens} tokens are assumed; see --block-size"]


def _writes(text: str | None) -> tuple[WriteRate | None, int | None]:
    """Return what was measured in a store, or what was given."""
    if text is None:
        return None, None
    if (path := Path(text)).is_dir() or "/" in text:
        paths = store_paths([path])
        with refusing(paths):
            found = measure_writes(paths)
        if found is None:
            raise ConfigError(f"nothing was written to {paths[0]} in the last 24 hours, as far as it still holds it.")
        return found, None
    return None, parse_size("--write-rate", text)


# -- for people --------------------------------------------------------------------------------


def _print(answer: Answer, console: Console) -> None:
    model, geometry = answer.model, answer.geometry
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="bold", no_wrap=True)
    lines.add_column(overflow="fold")
    lines.add_row("Model", printable(_described(model)))
    each = token_bytes(geometry, 1)
    all_ranks = token_bytes(geometry, geometry.rank_count)
    ranks = f", {in_words(round(each))} on each of {geometry.rank_count} ranks" if geometry.rank_count > 1 else ""
    lines.add_row("KV", f"{in_words(round(all_ranks))} a token{ranks}")
    if geometry.replicated:
        lines.add_row("", f"the same on every rank: {in_words(round(each))} a token on the drive")
    for group in geometry.groups:
        window = "full attention" if group.window_tokens is None else f"window of {number(group.window_tokens)}"
        payload = f"{in_words(group.payload_bytes)} in a slot of {in_words(group.slot_bytes)}"
        name = "Blocks" if group.group == 0 else ""
        lines.add_row(name, f"{group.block_tokens} tokens, {window}: {payload} on each rank")
    lines.add_row(
        "Conversation", f"{number(answer.context_tokens)} tokens, {in_words(round(all_ranks * answer.context_tokens))}"
    )
    console.print(lines)
    tiers = [(name, fit) for name, fit in (("CPU", answer.cpu), ("NVMe", answer.nvme)) if fit is not None]
    if tiers:
        console.print(_tiers(tiers, answer.context_tokens))
    _print_wear(answer, console)
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


def _tiers(tiers: list[tuple[str, Fit]], context_tokens: int) -> Table:
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
            number(fit.tokens // context_tokens),
            share(fit.used_bytes / fit.capacity_bytes) if fit.capacity_bytes else "?",
        )
    return table


def _print_wear(answer: Answer, console: Console) -> None:
    if answer.bytes_per_day is None:
        return
    how = ""
    if answer.writes is not None:
        how = f", measured over {answer.writes.seconds / 3600:.1f} h; at least, since what has left is not counted"
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="bold", no_wrap=True)
    lines.add_column(overflow="fold")
    lines.add_row("\nWrites", f"\n{in_words(answer.bytes_per_day)} a day{how}")
    if answer.days is not None:
        years = f" ({answer.days / 365:.1f} years)" if answer.days >= 365 else ""
        at_most = "at most " if answer.writes is not None else ""
        lines.add_row(
            "Wear-out",
            f"after {at_most}{number(int(answer.days))} days{years}, without what else is written to the drive",
        )
    console.print(lines)


# -- for programs ------------------------------------------------------------------------------


def answer_as_json(answer: Answer) -> dict[str, Any]:
    """Return the object that the module describes, of plain JSON values."""
    model, geometry = answer.model, answer.geometry
    return {
        "json_version": JSON_VERSION,
        "kvdisk_version": __version__,
        "model": {
            "kind": model.kind,
            "layers": len(model.windows),
            "kv_heads": model.kv_heads,
            "head_elements": model.head_elements,
            "mla": model.mla,
            "dtype": model.dtype,
            "longest_tokens": model.longest_tokens,
        },
        "tensor_parallel": geometry.rank_count,
        "block_tokens": geometry.hash_tokens,
        "token_bytes": round(token_bytes(geometry, geometry.rank_count)),
        "token_bytes_rank": round(token_bytes(geometry, 1)),
        "token_bytes_drive": round(token_bytes(geometry, geometry.part_count)),
        "groups": [
            {
                "group": group.group,
                "window_tokens": group.window_tokens,
                "block_tokens": group.block_tokens,
                "payload_bytes": group.payload_bytes,
                "slot_bytes": group.slot_bytes,
            }
            for group in geometry.groups
        ],
        "context_tokens": answer.context_tokens,
        "cpu": _fit_as_json(answer.cpu, answer.context_tokens),
        "nvme": _fit_as_json(answer.nvme, answer.context_tokens),
        "writes": None
        if answer.bytes_per_day is None
        else {
            "bytes_per_day": answer.bytes_per_day,
            "measured_s": answer.writes.seconds if answer.writes else None,
            "at_least": answer.writes is not None,
        },
        "endurance": None
        if answer.endurance_bytes is None
        else {"bytes": answer.endurance_bytes, "days": None if answer.days is None else round(answer.days, 1)},
        "notes": list(answer.notes),
    }


def _fit_as_json(fit: Fit | None, context_tokens: int) -> dict[str, int] | None:
    return None if fit is None else {**fit._asdict(), "conversations": fit.tokens // context_tokens}
