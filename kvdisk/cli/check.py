# SPDX-License-Identifier: Apache-2.0
"""``kvdisk check``: whether an engine can start with a configuration, and what it would have.

It refuses in the words in which the engine would. ``Answer`` is what ``--json`` prints; its shape
changes only with ``json_version``.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from kvdisk import __version__
from kvdisk.assembly import check_sizes, check_start
from kvdisk.cli.bench import measure
from kvdisk.cli.model_kv import read_model
from kvdisk.cli.output import (
    DENIED_ERRNOS,
    UNWRITABLE_ERRNOS,
    AsJson,
    Exit,
    make_lines,
    number,
    print_json,
    print_list,
    printable,
    refusal,
    report_console,
    speed,
)
from kvdisk.cli.output import size as in_words
from kvdisk.cli.size import MOST_RANKS, Fit, fit_cpu, fit_nvme, token_bytes
from kvdisk.config import Config
from kvdisk.device.control import HOMES, STORE_FILE
from kvdisk.device.drives import list_directories
from kvdisk.device.gds import gds_unavailable
from kvdisk.device.mounts import check_mount
from kvdisk.device.paths import DIRECTORY_MODE, allocated_bytes
from kvdisk.environment import CONNECTOR, transfer_of, variables
from kvdisk.environment import OFFLOADING_CONNECTOR as TIER_DOOR
from kvdisk.errors import ConfigError, DeviceError, KvdiskError, NoThread, thread_errors
from kvdisk.geometry import Geometry
from kvdisk.remote.base import ObjectOp, Objects, RemoteObject, Result
from kvdisk.remote.client import open_listed, open_remote
from kvdisk.remote.obstore_bucket import DENIED, why_failed
from kvdisk.tier_settings import MODULE as TIER_MODULE
from kvdisk.tier_settings import check_either, is_tier, own_tier
from kvdisk.worker.host_memory import Deployment, host_memory

TRIAL_BYTES = 1 << 20
_ALLOCATOR, _MOVING_MEMORY = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
_SAID_ELSEWHERE = DENIED_ERRNOS | UNWRITABLE_ERRNOS
"""Errors about what is printed, and about paths that nobody may look at: ``standard_output``
reports these."""
_POLL_S = 1.0
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where vLLM has it
_WHOLE = frozenset({"kv_connector", "kv_connector_extra_config", "secondary_tiers"})
"""Keys of what vLLM is given, of which kvdisk's settings are a part."""


@dataclass
class Directory:
    """A directory of ``store_dirs``, as an engine would have it.

    ``state``: "a store", "empty", or "to be made". ``free_bytes``: what the store holds already
    included. ``wanted_bytes``: its part of ``nvme_bytes``, for all engines. Of the drive:
    ``direct`` (O_DIRECT), ``device`` and bytes per second; None where they could not be measured.
    """

    path: Path
    state: str
    user: int
    mode: int
    free_bytes: int
    wanted_bytes: int
    direct: bool | None = None
    device: str | None = None
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None


@dataclass
class Trial:
    """The seconds that the remote store took for requests with an object of ``object_bytes``; None
    where a request was not tried, or failed. ``missing_s``: to say that an object is not there."""

    url: str
    object_bytes: int = TRIAL_BYTES
    missing_s: float | None = None
    put_s: float | None = None
    get_s: float | None = None


@dataclass
class Answer:
    """All that is shown, where an engine can start. ``engines``: data-parallel ranks on this host;
    ``cpu_bytes``, ``nvme_bytes`` and the fits are those of each. ``memory_bytes``: what processes
    may take here, of the memory of ``memory_of``. ``problems``: sentences; an engine starts in
    spite of them. ``token_bytes``: of one token on the drive; None without a model.
    ``door``: the class of vLLM's connector that kvdisk is, or is a tier of. ``vllm_memory_bytes``:
    of vLLM's own memory before a tier; None where that is not said."""

    cpu_bytes: int
    nvme_bytes: int | None
    memory_bytes: int
    memory_of: str
    directories: list[Directory]
    problems: list[str]
    token_bytes: int | None = None
    cpu: Fit | None = None
    nvme: Fit | None = None
    remote: Trial | None = None
    engines: int = 1
    door: str = CONNECTOR
    vllm_memory_bytes: int | None = None
    can_start: bool = field(init=False, default=True)
    ok: bool = field(init=False, default=True)
    json_version: int = 1
    kvdisk_version: str = __version__


def check(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG.json",
            help="What --kv-transfer-config is given, or kvdisk's own part of it. Without it: KVDISK_ variables.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG", help="A model's directory, or its config.json, to count in its tokens.", readable=False
        ),
    ] = None,
    tp: Annotated[int, typer.Option("--tp", metavar="N", min=1, max=MOST_RANKS, help="Tensor-parallel size.")] = 1,
    dp: Annotated[
        int, typer.Option("--dp", metavar="N", min=1, max=MOST_RANKS, help="Data-parallel ranks on this host.")
    ] = 1,
    kv_dtype: Annotated[str, typer.Option(help="As vLLM's kv_cache_dtype: auto, fp8, bfloat16 ...")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Say whether an engine can start with a configuration, and what it would have.

    Looks at every setting, at the memory that this container may take, at the
    directories (owner, mode, room), at the store in them as a start does (locks,
    what cannot be read), at trace_file, and at the drives: O_DIRECT, and how fast
    they are beside what a token of the model takes; and tries the remote store
    with an object of its own. Takes the settings of kvdisk as a tier of vLLM's
    own connector, too. Run it as the engine's user, in its container and with its
    variables. It makes nothing; the file that is measured on goes at once, and so
    does the object, where the credentials may delete.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  an engine can start

    [cyan]1[/cyan]  it can, and something is worth knowing; the report says what

    [cyan]2[/cyan]  it cannot, and one sentence says why; or wrong usage

    [cyan]3[/cyan]  an error of kvdisk's own: nobody knows
    """
    with _no_verdict_of_errors():
        try:
            whole, problems = _read(file, os.environ)
            settings = _settings_in(whole) if file is None else _settings_of(file, whole)
            config, as_tier = check_either(settings), is_tier(settings)
            if config.device == "gds" and (why := gds_unavailable()):
                raise ConfigError(f"device 'gds' cannot be used: {why}.")
            ranks = 1 if as_tier else tp  # a tier's blocks are of all ranks
            geometry = None if model is None else read_model(model, None, kv_dtype).geometry(ranks)
            check_sizes(config, Deployment(ranks, dp), geometry)
            problems += check_start(config, dp, has_memory=as_tier or config.cpu_bytes > 0)
            in_front_bytes = _vllm_memory_bytes(whole) if as_tier else None
            if in_front_bytes is not None:
                _check_vllm_memory(in_front_bytes, dp)
            answer = look(config, geometry, dp, problems)
            answer.door, answer.vllm_memory_bytes = TIER_DOOR if as_tier else CONNECTOR, in_front_bytes
        except KvdiskError as error:
            raise refusal(str(error).rstrip(".") + ".", can_start=False) from None
        if as_json:
            print_json(answer)
        else:
            _print(answer)
        raise typer.Exit(Exit.FINE if answer.ok else Exit.WRONG)


@contextmanager
def _no_verdict_of_errors() -> Iterator[None]:
    """End the command with an exit code of its own where an error of ours comes out: Python's own
    code would be taken for a verdict."""
    try:
        with thread_errors():
            yield
    except (typer.Exit, typer.Abort):
        raise
    except NoThread as error:  # nor would an engine have any
        raise refusal(f"{error}.", can_start=False) from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _SAID_ELSEWHERE:
            raise
        traceback.print_exc()
        said = f"an error of kvdisk's own, so nothing is known: {type(error).__name__}: {error}"
        raise refusal(said, Exit.OWN_ERROR) from None


def _read(file: Path | None, environment: Mapping[str, str]) -> tuple[Any, list[str]]:
    """Return what vLLM, or kvdisk, is given, from a file or from variables, and sentences about the
    environment in which an engine would be started with it. Raises ConfigError."""
    names = ", ".join(variables(environment))
    if file is not None:
        set_nothing = [f"{names} set nothing where the engine is given this file"] if names else []
        whole = _read_json(file)
        return whole, _of_environment(whole, environment) + set_nothing
    whole = transfer_of(environment)
    if whole is None:
        raise ConfigError("There is nothing to check: name a file, or set KVDISK_STORE_DIRS and KVDISK_NVME_BYTES.")
    return whole, _of_environment(whole, environment)


def read_settings(file: Path) -> Mapping[str, Any]:
    """Return kvdisk's settings from a file: a connector's, or a tier's entry, as ``is_tier`` says.
    Raises ConfigError."""
    return _settings_of(file, _read_json(file))


def _settings_of(file: Path, whole: Any) -> Mapping[str, Any]:
    found = _settings_in(whole)
    if not isinstance(found, dict):
        raise ConfigError(f"{file} has no settings of {CONNECTOR}, nor a tier of kvdisk's.")
    return found


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is no JSON: {error}.") from None


def _of_environment(config: Any, environment: Mapping[str, str]) -> list[str]:
    """Return what in the environment may keep vLLM from starting with a connector. ``config``: as
    JSON has it. Raises ConfigError where it does."""
    problems = []
    plugins = environment.get("VLLM_PLUGINS")
    if plugins is not None and "kvdisk" not in plugins.split(","):
        sentence = f"VLLM_PLUGINS is {plugins!r}, and vLLM finds kvdisk only where it lists kvdisk"
        text = json.dumps(config)
        is_whole = any(f'"{name}"' in text for name in ("kv_connector", "secondary_tiers"))
        if is_whole and not any(f'"{name}"' in text for name in ("kv_connector_module_path", TIER_MODULE)):
            raise ConfigError(f"{sentence}.")
        problems.append(sentence)
    if _MOVING_MEMORY in environment.get(_ALLOCATOR, ""):
        problems.append(
            f"{_ALLOCATOR} has {_MOVING_MEMORY}, with which vLLM starts no connector, unless in sleep mode: take it out"
        )
    return problems


def _settings_in(whole: Any) -> Any:
    """Return kvdisk's settings in what vLLM takes for a connector, alone or among several; the
    value itself where it is no such thing, and None where there are none. Raises ConfigError."""
    if not isinstance(whole, dict) or _WHOLE.isdisjoint(whole):
        return whole
    name, extra = whole.get("kv_connector", TIER_DOOR), whole.get("kv_connector_extra_config", {})
    if "secondary_tiers" in whole:  # vLLM's own connector's part alone
        extra = whole
    if name == "MultiConnector" and isinstance(extra, dict):
        children = [child for child in extra.get("connectors", []) if isinstance(child, dict)]
        found = [_settings_in(child) for child in children if child.get("kv_connector") in {CONNECTOR, TIER_DOOR}]
        return next((settings for settings in found if settings is not None), None)
    if name == TIER_DOOR:
        return own_tier(extra) if isinstance(extra, dict) else None
    if name != CONNECTOR:
        return None
    if whole.get("kv_role") != "kv_both":
        raise ConfigError(f"kvdisk does not support the role {whole.get('kv_role')}; set kv_role to kv_both.")
    return extra


def _vllm_memory_bytes(whole: Any) -> int | None:
    """Return the bytes that vLLM is told to keep in memory before kvdisk's tier; None where it is
    not said."""
    if isinstance(whole, list):
        return next((found for one in whole if (found := _vllm_memory_bytes(one)) is not None), None)
    if not isinstance(whole, dict):
        return None
    tiers = whole.get("secondary_tiers")
    if isinstance(tiers, list) and any(map(is_tier, tiers)):
        said = whole.get("cpu_bytes_to_use")
        return int(said) if isinstance(said, int | float) and said > 0 else None
    return _vllm_memory_bytes(list(whole.values()))


def _check_vllm_memory(size_bytes: int, engines: int) -> None:
    """Raise ConfigError where vLLM could never have what it keeps before a tier: a file of each
    engine in _SHARED_MEMORY, which it fills at the start."""
    limit_bytes, where = host_memory()
    places = {where: limit_bytes}
    with suppress(OSError):
        shared = os.statvfs(_SHARED_MEMORY)  # all of it: an engine that runs now may have its file there
        places[f"{_SHARED_MEMORY}, where it keeps them,"] = shared.f_blocks * shared.f_frsize
    for place, room_bytes in places.items():
        if size_bytes * engines > room_bytes:
            each = f", for each of {engines} engines" if engines > 1 else ""
            raise ConfigError(
                f"vLLM is to keep {in_words(size_bytes)} before the tier{each}, and {place} has {in_words(room_bytes)};"
                " lower cpu_bytes_to_use (KVDISK_CPU_BYTES)."
            )


def look(config: Config, geometry: Geometry | None, engines: int, problems: Sequence[str]) -> Answer:
    """Return what an engine of this configuration would have. ``problems``: those that are known
    already. Raises ConfigError where nothing fits into a tier, DeviceError where a drive fails."""
    answer = Answer(config.cpu_bytes, config.nvme_bytes, *host_memory(), [], list(problems), engines=engines)
    if geometry is not None:
        answer.cpu = fit_cpu(geometry, config.cpu_bytes) if config.cpu_bytes else None
        if config.nvme_bytes is not None:
            answer.nvme = fit_nvme(geometry, config.nvme_bytes, len(config.store_dirs))
        answer.token_bytes = round(token_bytes(geometry, geometry.shard_count))
    for path in list_directories(config.store_dirs) if config.store_dirs else ():
        answer.directories.append(_look_at(path, config, geometry, answer))
    answer.problems += _without_room(answer)
    if config.remote is not None:
        answer.remote = Trial(config.remote)
        answer.problems += [f"{config.remote}: {what}" for what in _try_remote(config, answer.remote)]
    answer.ok = not answer.problems
    return answer


def _without_room(answer: Answer) -> Iterator[str]:
    """Yield a sentence for each drive that has less room than is wanted. Directories may be on the
    same drive."""
    drives: dict[int, list[Directory]] = {}
    for one in answer.directories:
        drives.setdefault(_place_of(one.path).stat().st_dev, []).append(one)
    of_engines = f" of {answer.engines} engines" if answer.engines > 1 else ""
    for found in drives.values():
        held = [_held_bytes(one.path) for one in found]
        free_bytes = found[0].free_bytes - held[0] + sum(held)
        wanted_bytes = sum(one.wanted_bytes for one in found)
        if free_bytes < wanted_bytes:
            names = " and ".join(str(one.path) for one in found)
            have, their = ("has", "its") if len(found) == 1 else ("together have", "their")
            yield (
                f"{names} {have} room for {in_words(free_bytes)}, and {their} part of nvme_bytes{of_engines} is "
                f"{in_words(wanted_bytes)}: the tier keeps what there is room for"
            )


def _held_bytes(path: Path) -> int:
    """Return what the store in a directory holds; 0 where that cannot be looked at, which
    ``check_start`` has said."""
    with suppress(OSError):
        return allocated_bytes(path / HOMES)
    return 0


def _place_of(path: Path) -> Path:
    return path if path.exists() else path.parent


def _look_at(path: Path, config: Config, geometry: Geometry | None, answer: Answer) -> Directory:
    """Describe a directory that an engine could use, and add to the answer's problems what is wrong
    with it."""
    there, place, problems = path.exists(), _place_of(path), answer.problems
    room, status = os.statvfs(place), place.stat()
    found = Directory(
        path,
        "to be made" if not there else "a store" if (path / STORE_FILE).exists() else "empty",
        status.st_uid if there else os.geteuid(),
        status.st_mode & 0o7777 if there else DIRECTORY_MODE,
        room.f_bavail * room.f_frsize + _held_bytes(path),
        (config.nvme_bytes or 0) // len(config.store_dirs) * answer.engines,
    )
    if said := check_mount(path):
        problems.append(said.removeprefix("store_dirs: ").rstrip("."))
    try:
        bench = measure(place, geometry, None)
    except (ConfigError, DeviceError) as error:
        problems.append(f"the drive of {path} was not measured: {str(error).rstrip('.')}")
        return found
    found.direct, found.device = bench.direct, bench.device
    found.read_bytes_per_s, found.write_bytes_per_s = bench.read, bench.write
    if not bench.direct:
        problems.append(f"{path} does not support O_DIRECT: blocks go through the page cache, and take memory there")
    if bench.device == "posix-threads":
        problems.append(f"threads would move blocks of {path}, more slowly than the kernel's queue: {bench.why}")
    return found


class _Heard(logging.Handler):
    """Keeps the last log line of the remote store's client, which an engine would log."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging.Handler``."""
        self.last = record.getMessage()


def _try_remote(config: Config, trial: Trial) -> list[str]:
    """Use the remote store as an engine does; return what is wrong."""
    problems: list[str] = []
    bucket = open_listed(config)
    if bucket is not None:
        try:
            next(bucket.pages(""), None)
        except Exception as error:  # whatever the client raises
            if (why := why_failed(str(error))) != DENIED:
                return [why]
            problems.append("no right to list (s3:ListBucket), without which a missing object may look like a failure")
    name = f"kvdisk1/check/{secrets.token_hex(8)}"
    body, found = bytearray(secrets.token_bytes(TRIAL_BYTES)), bytearray(TRIAL_BYTES)
    heard, log = _Heard(), logging.getLogger("kvdisk.remote")
    log.addHandler(heard)
    try:
        with closing(open_remote(config)) as objects:
            trial.missing_s = _timed(objects, ObjectOp.EXISTS, name, bytearray(), problems, heard)
            if trial.missing_s is not None and not config.remote_read_only:
                trial.put_s = _timed(objects, ObjectOp.PUT, name, body, problems, heard)
            if trial.put_s is not None:
                trial.get_s = _timed(objects, ObjectOp.GET, name, found, problems, heard)
    finally:
        log.removeHandler(heard)
        with suppress(Exception):  # who may not delete leaves it to the lifecycle rule
            if bucket is not None:
                bucket.delete(name)
    if trial.get_s is not None and found != body:
        problems.append("what was read is not what had been written")
    return problems


_WANTED = {ObjectOp.EXISTS: Result.ABSENT, ObjectOp.PUT: Result.OK, ObjectOp.GET: Result.OK}
_ACTS = {ObjectOp.EXISTS: "asking for an object", ObjectOp.PUT: "writing", ObjectOp.GET: "reading"}


def _timed(
    objects: Objects, op: ObjectOp, name: str, buffer: bytearray, problems: list[str], heard: _Heard
) -> float | None:
    """Return the seconds that a request took; None, and add a problem, where its result is not the
    expected one."""
    started_s = time.monotonic()
    objects.submit(op, [RemoteObject(name, memoryview(buffer))])
    while not (ended := objects.poll(_POLL_S)):
        pass
    taken_s, result = time.monotonic() - started_s, ended[0].results[0]
    if result is _WANTED[op]:
        return taken_s
    said = why_failed(heard.last.partition(" failed: ")[2]) or f"the answer is {result.name}"
    only_reads = ": set remote_read_only, or give it" if op is ObjectOp.PUT and said == DENIED else ""
    problems.append(f"{_ACTS[op]} failed: {said}{only_reads}")
    return None


# -- for people --------------------------------------------------------------------------------


def _print(answer: Answer) -> None:
    console, lines = report_console(), make_lines()
    for name, size_bytes, fit in (
        ("CPU tier", answer.cpu_bytes, answer.cpu),
        ("NVMe tier", answer.nvme_bytes, answer.nvme),
    ):
        tokens = f" = {number(fit.tokens)} tokens" if fit is not None else ""
        each = f", of each of {answer.engines} engines" if answer.engines > 1 else ""
        nothing = "none"
        if answer.door == TIER_DOOR:
            size_of_it = f", {in_words(answer.vllm_memory_bytes)}{each}" if answer.vllm_memory_bytes else ""
            nothing = f"vLLM's own{size_of_it}"
        lines.add_row(name, f"{in_words(size_bytes)}{tokens}{each}" if size_bytes else nothing)
    lines.add_row("Memory", f"{in_words(answer.memory_bytes)} of {printable(answer.memory_of)}")
    for one in answer.directories:
        lines.add_row("Directory", printable(one.path))
        lines.add_row("", f"{one.state}; user {one.user}, mode {one.mode:04o}")
        lines.add_row("", f"room for {in_words(one.free_bytes)}, {in_words(one.wanted_bytes)} wanted")
        if one.read_bytes_per_s is not None and one.write_bytes_per_s is not None:
            direct = "with O_DIRECT" if one.direct else "without O_DIRECT"
            lines.add_row("", f"{one.device} {direct}")
            lines.add_row("", f"reads {_rate(one.read_bytes_per_s, answer)}")
            lines.add_row("", f"writes {_rate(one.write_bytes_per_s, answer)}")
    if answer.remote is not None:
        lines.add_row("Remote", printable(answer.remote.url))
        lines.add_row("", _told(answer.remote))
    console.print(lines)
    read_bytes_per_s = sum(one.read_bytes_per_s or 0 for one in answer.directories)
    if answer.token_bytes and read_bytes_per_s:
        tokens = number(int(read_bytes_per_s / answer.token_bytes))
        console.print(f"Loads pay where the GPU computes fewer than {tokens} prompt tokens a second.", soft_wrap=True)
    print_list("Worth knowing", answer.problems, console, None, "")
    later = answer.remote is not None and answer.remote.missing_s is None
    console.print(f"An engine can start with this{', and shares blocks once the remote store works' if later else ''}.")


def _told(trial: Trial) -> str:
    times = (("written", trial.put_s), ("read", trial.get_s), ("said to be missing", trial.missing_s))
    said = [f"{what} in {taken_s * 1000:,.0f} ms" for what, taken_s in times if taken_s is not None]
    return f"{in_words(trial.object_bytes)} {', '.join(said)}" if said else "it cannot be used now"


def _rate(bytes_per_s: float, answer: Answer) -> str:
    tokens = f" = {number(int(bytes_per_s / answer.token_bytes))} tokens/s" if answer.token_bytes else ""
    return f"{speed(bytes_per_s)}{tokens}"
