# SPDX-License-Identifier: Apache-2.0
"""``kvdisk why``: how far a prompt would hit in a store, where the hit ends, and why.

``Answer`` is what ``--json`` prints. In an engine with a drafter the hit can be a block shorter:
HOME does not say which groups leave the last block out.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from kvdisk.blocks import BlockKey, make_block_keys
from kvdisk.cli.indexes import (
    ReadNamespace,
    block_tokens,
    by_namespace,
    described_geometry,
    find_namespace,
    index_problems,
    read_homes,
)
from kvdisk.cli.output import (
    ID_LETTERS,
    AsJson,
    Exit,
    StoreDirectories,
    duration,
    engine_store,
    folded,
    left,
    make_lines,
    make_table,
    number,
    opening,
    plural,
    print_json,
    print_list,
    printable,
    report_console,
    short_model,
)
from kvdisk.cli.remote import FromRemote, remote_blocks, remote_config
from kvdisk.cli.size import MOST_RANKS
from kvdisk.config import Config
from kvdisk.device.telemetry_file import read_telemetry
from kvdisk.errors import ConfigError, CorruptRecord
from kvdisk.geometry import FILE_EPOCH, Geometry, GroupGeometry
from kvdisk.manager.catalog import ABSENT, READY
from kvdisk.manager.prefix_match import Lookups

NONE_HASH_SEED = "vllm-none-hash"
"""vLLM: the seed of the hash before the first block, unless PYTHONHASHSEED is set."""
_FIELDS_SHOWN = 3
_NUMBER = re.compile(r"[0-9]{1,19}")


@dataclass(frozen=True)
class Found:
    """What one namespace has of the prompt. ``hit_tokens``: what an engine would load.

    ``differs``: for each field of the fingerprint that differs from the namespace that was asked
    about, its value there and here, as JSON text or a digest of it; null where HOME of one of the
    two does not list its fields.
    """

    fingerprint: str
    model: Any
    in_use: bool
    block_tokens: int
    hit_tokens: int
    differs: Mapping[str, tuple[str | None, str | None]] | None


@dataclass(frozen=True)
class Reset:
    """A running engine that serves nothing that was stored before ``reset_s``. ``hit_tokens``: what
    it would load of the prompt."""

    engine_store: str
    reset_s: float | None
    hit_tokens: int


@dataclass(frozen=True)
class FoundFar:
    """What a remote store adds. ``hit_tokens``: the hit with what the remote store has, of all
    ranks; null where it did not answer."""

    url: str
    hit_tokens: int | None


@dataclass(frozen=True)
class Stretch:
    """A part of the prompt, and what becomes of it. ``hit``: it would be loaded. ``here``: it is
    stored, and would not hit. ``missing``: it is not stored. ``rest``: it fills no block, and is
    computed."""

    start_tokens: int
    end_tokens: int
    state: Literal["hit", "here", "missing", "rest"]


@dataclass(frozen=True)
class Answer:
    """The answer. ``found``: in the namespace that was asked about. ``ends``: why the hit ends
    there. ``remote``: null where none was named. ``path``: the whole prompt, by blocks of the group
    with full attention.

    ``elsewhere``: namespaces that have more of the prompt. ``problems``: sentences. ``resets``:
    engines of the namespace that were reset; where all running ones were, ``found`` is what the
    best of them has.
    """

    prompt_tokens: int
    found: Found
    ends: str
    elsewhere: tuple[Found, ...]
    problems: tuple[str, ...]
    remote: FoundFar | None = None
    resets: tuple[Reset, ...] = ()
    path: tuple[Stretch, ...] = ()


def why(
    directories: StoreDirectories,
    tokens: Annotated[
        Path | None,
        typer.Option(
            "--tokens", metavar="FILE", help="The prompt's token ids: JSON, or what vLLM's /tokenize answers."
        ),
    ] = None,
    prompt: Annotated[Path | None, typer.Option("--prompt", metavar="FILE", help="The prompt's text.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="PATH", help="Of --prompt: a model's directory.")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", metavar="N", help="How its id or its model begins; else the last used.")
    ] = None,
    salt: Annotated[str | None, typer.Option("--cache-salt", metavar="TEXT", help="Of the request.")] = None,
    remote: FromRemote = None,
    as_json: AsJson = False,
) -> None:
    """Say how far a prompt would hit, where that ends, and why; and which namespace has more of it.

    Looks at what is on the drive, so not at what only the memory of an engine has. With --remote,
    also asks a remote store for what is missing there. Where another
    namespace has more, the fields of the fingerprint that differ are named. Images in a prompt
    and LoRA adapters are not considered. The tokens of a chat are what the server's /tokenize
    answers.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  the answer is shown

    [cyan]1[/cyan]  it is shown, and an index could not be read, or the remote store did not answer;
    the report says which

    [cyan]2[/cyan]  no answer: not a store, an empty one, no tokens, or wrong usage
    """
    with opening(directories) as named:
        ids = _token_ids(tokens, prompt, tokenizer)
        answer = explain(named, ids, namespace, salt, None if remote is None else remote_config(remote))
    print_json(answer, 1) if as_json else _print(answer, report_console())
    raise typer.Exit(Exit.WRONG if answer.problems else Exit.FINE)


def _token_ids(tokens: Path | None, prompt: Path | None, tokenizer: Path | None) -> list[int]:
    """Read the prompt's token ids. Raises ConfigError."""
    if (tokens is None) == (prompt is None) or (prompt is None) != (tokenizer is None):
        raise ConfigError("name the prompt: --tokens FILE, or --prompt FILE with --tokenizer PATH")
    file = tokens or prompt
    assert file is not None
    try:
        text = file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    return parse_token_ids(text, str(file)) if tokenizer is None else _tokenize(text, tokenizer)


def parse_token_ids(text: str, where: str) -> list[int]:
    """Read token ids: numbers, a JSON list of them, or an object with one under tokens. ``where``:
    what holds the text, for the sentence of the ConfigError that is raised where it is none of
    these."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = [int(word) if _NUMBER.fullmatch(word) else word for word in re.split(r"[\s,]+", text.strip())]
    found = found.get("tokens") if isinstance(found, dict) else found
    if not (isinstance(found, list) and found and all(type(one) is int and 0 <= one < 1 << 63 for one in found)):
        raise ConfigError(f"{where} does not hold token ids: a list of numbers, or an object with one under tokens")
    return found


def _tokenize(text: str, path: Path) -> list[int]:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError(
            "--tokenizer needs the package tokenizers, which comes with vLLM; --tokens does not"
        ) from None
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        ids: list[int] = Tokenizer.from_file(str(file)).encode(text).ids
    except Exception as error:  # the package raises nothing more special
        raise ConfigError(f"{file} cannot be read as a tokenizer ({error})") from None
    return ids


# -- vLLM's hashes -----------------------------------------------------------------------------


def chain_hashes(
    tokens: Sequence[int], hash_tokens: int, algorithm: str, seed: str | None, salt: str | None = None
) -> list[bytes]:
    """Return the hash of each full block of ``hash_tokens`` as vLLM makes it, which covers all
    blocks before it.

    ``algorithm``: sha256 or sha256_cbor. ``seed``: PYTHONHASHSEED of the engine; None where it is
    unset. ``salt``: the request's cache_salt, which goes into the first block's hash.
    """
    encode, hashes = ENCODINGS[algorithm], []
    parent = hashlib.sha256(encode(NONE_HASH_SEED if seed is None else seed)).digest()
    for start in range(0, len(tokens) - hash_tokens + 1, hash_tokens):
        extra = (("cache_salt", salt),) if salt and start == 0 else None
        named = (parent, tuple(tokens[start : start + hash_tokens]), extra)
        parent = hashlib.sha256(encode(named)).digest()
        hashes.append(parent)
    return hashes


def _cbor(value: Any) -> bytes:
    """Return canonical CBOR (RFC 8949, 4.2.1) of None, text, bytes, numbers that are not negative,
    and tuples."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _cbor_head(0, value)
    if isinstance(value, bytes):
        return _cbor_head(2, len(value)) + value
    if isinstance(value, str):
        return _cbor_head(3, len(value.encode())) + value.encode()
    return _cbor_head(4, len(value)) + b"".join(map(_cbor, value))


def _cbor_head(kind: int, count: int) -> bytes:
    if count < 24:
        return bytes([kind << 5 | count])
    width = next(width for width in range(4) if count < 1 << (8 << width))
    return bytes([kind << 5 | 24 + width]) + count.to_bytes(1 << width, "big")


ENCODINGS: dict[str, Callable[[Any], bytes]] = {"sha256": partial(pickle.dumps, protocol=5), "sha256_cbor": _cbor}


# -- what the store has ------------------------------------------------------------------------


class _Searched:
    """A prompt in one namespace. ``keys``: of the prompt's blocks, by KV-cache group. ``epochs``:
    of those that are on the drive. ``resets``: the engines that serve an epoch of their own."""

    def __init__(self, namespace: ReadNamespace, tokens: Sequence[int], salt: str | None) -> None:
        assert namespace.record is not None
        self.namespace, self.facts = namespace, namespace.record.description.get("facts")
        self.geometry = _geometry(namespace)
        algorithm, seed = _hash_of(self.facts)
        hash_tokens = _tokens_per_hash(self.facts, self.geometry.hash_tokens)
        hashes = chain_hashes(tokens, hash_tokens, algorithm, seed, salt)
        scales = [(group.group, group.block_tokens // hash_tokens) for group in self.geometry.groups]
        self.keys = [make_block_keys(hashes[scale - 1 :: scale], group) for group, scale in scales]
        columns, prompt = namespace.blocks.columns, {key for keys in self.keys for key in keys}
        self.epochs: dict[bytes, set[int]] = {}
        for key, epoch in zip(columns.keys, columns.epochs.tolist(), strict=True):
            if key in prompt:
                self.epochs.setdefault(key, set()).add(epoch)
        self._epoch = FILE_EPOCH
        self._last = len(tokens) - 1
        live = [home for home in namespace.engine_stores if home.summary.alive]
        served = [(home.summary.id, *_served(home.summary.path)) for home in live]
        resets = [(epoch, Reset(name, at_s, self._hit(epoch))) for name, epoch, at_s in served if epoch != FILE_EPOCH]
        self.resets = tuple(reset for _, reset in resets)
        if resets and len(resets) == len(live):  # nobody serves what the files' weights have computed
            self._epoch, _ = max(resets, key=lambda one: one[1].hit_tokens)
        self.hit_tokens = self._hit(self._epoch)

    def _hit(self, epoch: int) -> int:
        """Return the tokens that would hit, of what was stored in an epoch."""

        def presences(keys: Sequence[BlockKey]) -> bytes:
            return bytes(READY if epoch in self.epochs.get(key, ()) else ABSENT for key in keys)

        return Lookups().find(presences, self.geometry, self.keys, 0, self._last).ready

    def has(self, key: BlockKey) -> bool:
        """Return whether a block is served."""
        return self._epoch in self.epochs.get(key, ())

    @property
    def serves_nothing_old(self) -> bool:
        """Whether all running engines were reset."""
        return self._epoch != FILE_EPOCH

    @property
    def missing(self) -> list[BlockKey]:
        """The prompt's blocks that the store lacks."""
        return [key for keys in self.keys for key in keys if not self.has(key)]

    @property
    def shard_count(self) -> int:
        """Shards of a block. Raises ConfigError."""
        ranks: Any = described_geometry(self.namespace.record).get("ranks")
        if not isinstance(ranks, int) or not 0 < ranks <= MOST_RANKS:
            raise ConfigError(f"HOME of namespace {self.namespace.id[:ID_LETTERS]} does not say how many ranks it has")
        return ranks

    def hit_with(self, others: Collection[BlockKey], tokens: int) -> int:
        """Return the tokens that would hit if the blocks of ``others`` were here too."""

        def presences(keys: Sequence[BlockKey]) -> bytes:
            return bytes(READY if key in others or self.has(key) else ABSENT for key in keys)

        return Lookups().find(presences, self.geometry, self.keys, 0, tokens - 1).ready

    @property
    def main(self) -> GroupGeometry:
        """The first group with full attention; where none has it, the first group."""
        return next((group for group in self.geometry.groups if group.reads_all), self.geometry.groups[0])

    def followers(self, position: int) -> int:
        """Return how many blocks of the main group follow this prompt's block before
        ``position``."""
        parent = self.keys[self.main.group][position - 1] if position else b""
        columns, groups = self.namespace.blocks.columns, self.namespace.blocks.groups
        is_shared = (groups == self.main.group) & (columns.epochs == self._epoch)
        rows = zip(columns.keys, columns.each_parent(), is_shared.tolist(), strict=True)
        return len({key for key, above, shared in rows if shared and above == parent})

    def found(self, asked: _Searched | None = None) -> Found:
        """Describe this namespace, compared with the one that was asked about."""
        differs = None
        if isinstance(self.facts, dict) and asked is not None and isinstance(asked.facts, dict):
            here, there = self.facts, asked.facts
            names = sorted(here.keys() | there.keys())
            differs = {name: (there.get(name), here.get(name)) for name in names if here.get(name) != there.get(name)}
        record = self.namespace.record
        assert record is not None
        in_use = any(home.summary.alive for home in self.namespace.engine_stores)
        sizes = (self.geometry.groups[0].block_tokens, self.hit_tokens)
        return Found(self.namespace.id, record.description.get("model"), in_use, *sizes, differs)


def _geometry(namespace: ReadNamespace) -> Geometry:
    """Return what HOME says of blocks, as far as tokens go. Raises ConfigError."""
    said: dict[str, Any] = described_geometry(namespace.record)
    sizes, hash_tokens = block_tokens(namespace.record), said.get("hash_tokens")
    if not (
        isinstance(hash_tokens, int) and hash_tokens > 0 and sizes and all(s % hash_tokens == 0 < s for s in sizes)
    ):
        raise ConfigError(f"HOME of namespace {namespace.id[:ID_LETTERS]} does not say how many tokens a block has")
    groups = [
        GroupGeometry(at, size, 1, _tokens(group, "window_tokens"), chunk_tokens=_tokens(group, "chunk_tokens"))
        for at, (size, group) in enumerate(zip(sizes, said["groups"], strict=True))
    ]
    return Geometry(tuple(groups), 1, hash_tokens)


def _tokens(group: dict[str, Any], name: str) -> int | None:
    tokens = group.get(name)
    return tokens if isinstance(tokens, int) and tokens > 0 else None


def _tokens_per_hash(facts: object, block_tokens: int) -> int:
    """Return how many tokens each hash of vLLM covers.

    A chunk of vLLM's own offloading may have several hashes, and the last one names it. Elsewhere
    it is ``block_tokens``, the greatest common divisor of the groups' blocks.
    """
    with suppress(AttributeError, TypeError, ValueError):
        tokens, _ = json.loads(facts.get("row_tokens"))  # type: ignore[attr-defined]
        if isinstance(tokens, int) and tokens > 0 and block_tokens % tokens == 0:
            return tokens
    return block_tokens


def _hash_of(facts: object) -> tuple[str, str | None]:
    """Return the hash algorithm and its seed; vLLM's defaults where HOME does not say, as with an
    older kvdisk."""
    found: Any = None
    with suppress(AttributeError, TypeError, ValueError):
        found = json.loads(facts.get("hash"))  # type: ignore[attr-defined]
    is_known = isinstance(found, list) and len(found) == 2 and found[0] in ENCODINGS
    return (found[0], found[1]) if is_known else ("sha256", None)


def explain(
    directories: Sequence[Path],
    tokens: Sequence[int],
    wanted: str | None = None,
    salt: str | None = None,
    remote: Config | None = None,
) -> Answer:
    """Look for a prompt in a store. ``wanted``: as ``find_namespace`` takes it; None: the namespace
    in use, or the one that was used last. ``remote``: the configuration of a remote store to ask
    too.

    Raises ConfigError, and as ``list_homes``.
    """
    homes = read_homes(directories)
    known = [one for one in by_namespace(homes) if one.record is not None]
    if not known:
        raise ConfigError(f"{directories[0]} is empty, so nothing would hit")
    mine = max(known, key=_recency) if wanted is None else find_namespace(homes, wanted)
    asked = _Searched(mine, tokens, salt)
    others = []
    for one in known:
        with suppress(ConfigError):  # of an older kvdisk: nobody is asked about it
            others.append(_Searched(one, tokens, salt))
    more = sorted((one for one in others if one.hit_tokens > asked.hit_tokens), key=lambda one: -one.hit_tokens)
    elsewhere = tuple(one.found(asked) for one in more)
    problems, far = index_problems(homes), None
    if remote is not None:
        assert remote.remote is not None
        there = remote_blocks(remote, mine.id, asked.missing, asked.shard_count)
        far = FoundFar(remote.remote, None if there is None else asked.hit_with(there, len(tokens)))
        problems += ("the remote store did not answer: see kvdisk check",) if there is None else ()
    path = tuple(_path(asked, len(tokens)))
    return Answer(len(tokens), asked.found(), _why_it_ends(asked, tokens), elsewhere, problems, far, asked.resets, path)


def _path(asked: _Searched, prompt_tokens: int) -> Iterator[Stretch]:
    """Yield what becomes of each part of the prompt, neighbours of the same kind as one."""
    hit, size, keys = asked.hit_tokens, asked.main.block_tokens, asked.keys[asked.main.group]
    first, whole = hit // size, len(keys) * size
    start, state = 0, "hit"
    for at, is_here in enumerate(map(asked.has, keys[first:]), first):
        begins, then = max(hit, at * size), "here" if is_here else "missing"
        if then != state:
            yield from _stretch(start, begins, state)
            start, state = begins, then
    yield from _stretch(start, max(hit, whole), state)
    yield from _stretch(max(hit, whole), prompt_tokens, "rest")


def _stretch(start: int, end: int, state: Any) -> list[Stretch]:
    return [Stretch(start, end, state)] if start < end else []


def _served(home_path: Path) -> tuple[int, float | None]:
    """Return the epoch that a running engine serves, and since when; FILE_EPOCH where it does not
    say."""
    with suppress(CorruptRecord, OSError):
        if (figures := read_telemetry(home_path)) is not None:
            return figures.epoch, figures.reset_s
    return FILE_EPOCH, None


def _recency(namespace: ReadNamespace) -> tuple[bool, int]:
    assert namespace.record is not None
    return any(home.summary.alive for home in namespace.engine_stores), namespace.record.last_use_s


def _why_it_ends(asked: _Searched, tokens: Sequence[int]) -> str:
    """Say why the hit is not longer."""
    hit, step = asked.hit_tokens, asked.geometry.alignment_tokens
    if len(tokens) <= step:
        return f"the prompt is too short: a hit is of whole blocks of {step} tokens, and its last token is computed"
    if hit >= (len(tokens) - 1) // step * step:
        return "nothing is missing: the last token, and what does not fill a block, are always computed"
    size, keys = asked.main.block_tokens, asked.keys[asked.main.group]
    here = [asked.has(key) for key in keys]
    position = next((at for at in range(hit // size, len(keys)) if not here[at]), len(keys))
    if position * size >= hit + step:
        return f"another KV-cache group lacks blocks for tokens {number(hit)} on: evicted, or not yet written"
    where = f"tokens {number(position * size)} to {number((position + 1) * size)}"
    if why := _of_another_epoch(asked, keys[position], where):
        return why
    if later := here[position:].count(True):
        return f"{where} are missing, and {plural(later, 'block')} behind them are here: they were lost or evicted"
    return _what_follows(asked, position, where)


def _of_another_epoch(asked: _Searched, key: BlockKey, where: str) -> str | None:
    """Say why a block that is here is not served; None where it is not here."""
    if asked.serves_nothing_old and FILE_EPOCH in asked.epochs.get(key, ()):
        ago = duration(max(0.0, time.time() - max(reset.reset_s or 0.0 for reset in asked.resets)))
        return f"{where} were stored before the engine was reset, {ago} ago: only the next start serves them again"
    if asked.epochs.get(key):
        return f"{where} were stored with weights that an engine had changed: those are private to that engine"
    return None


def _what_follows(asked: _Searched, position: int, where: str) -> str:
    """Say what is stored in place of the rest of the prompt."""
    count = asked.followers(position)
    if not count:
        return f"nothing behind it is stored: {where} were never seen, refused, evicted, or are not yet written"
    if not position:
        return f"{plural(count, 'stored prompt')} begin differently: this one differs from each within {where}"
    return f"{plural(count, 'stored prompt')} continue differently from here: this one differs from each within {where}"


# -- for people --------------------------------------------------------------------------------


def _print(answer: Answer, console: Console) -> None:
    found, lines = answer.found, make_lines()
    style = "bold green" if found.hit_tokens else "bold yellow"
    said = f"{number(found.hit_tokens)} of {number(answer.prompt_tokens)} prompt tokens would hit"
    lines.add_row("Verdict", Text(said, style))
    whose = f"{found.fingerprint[:ID_LETTERS]}  {short_model(found.model)}"
    in_use = "in use" if found.in_use else "of stopped engines"
    lines.add_row("Namespace", f"{whose}  ({in_use})")
    lines.add_row("Ends", answer.ends)
    for reset in answer.resets:
        ago = "" if reset.reset_s is None else f" {duration(max(0.0, time.time() - reset.reset_s))} ago"
        said = f"{engine_store(reset.engine_store)} was reset{ago}: of what it has stored since, "
        lines.add_row("Reset", f"{said}{number(reset.hit_tokens)} tokens would hit")
    if answer.remote is not None:
        has = "no answer"
        if answer.remote.hit_tokens is not None:
            has = f"{number(answer.remote.hit_tokens)} tokens would hit, with what it has"
        lines.add_row("Remote", f"{printable(answer.remote.url)}: {has}")
    console.print(lines)
    if answer.elsewhere:
        columns = (left("Namespace", "magenta"), folded("Model"), "Hits", folded("Differs in (there, asked)"))
        table = make_table("Other namespaces have more of it", console.width, *columns)
        for other in answer.elsewhere:
            name = other.fingerprint[:ID_LETTERS]
            table.add_row(name, short_model(other.model), number(other.hit_tokens), _differences(other.differs))
        console.print(table)
    print_list(plural(len(answer.problems), "problem"), answer.problems, console, None, "")


def _differences(differs: Mapping[str, tuple[str | None, str | None]] | None) -> str:
    if differs is None:
        return "? (an older kvdisk made one of them)"
    named = [f"{printable(name)}: {printable(here)}, {printable(there)}" for name, (there, here) in differs.items()]
    more = [f"and {len(named) - _FIELDS_SHOWN} more (--json)"] if len(named) > _FIELDS_SHOWN else []
    return "\n".join([*named[:_FIELDS_SHOWN], *more])
