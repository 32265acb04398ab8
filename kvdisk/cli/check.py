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
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from kvdisk import __version__
from kvdisk.assembly import check_settings, open_remote
from kvdisk.cli.bench import measure
from kvdisk.cli.model_kv import read_model
from kvdisk.cli.output import (
    AsJson,
    Exit,
    make_lines,
    number,
    print_json,
    print_list,
    printable,
    refusal,
    report_console,
)
from kvdisk.cli.output import size as in_words
from kvdisk.cli.size import MOST_RANKS, Fit, fit_cpu, fit_nvme, token_bytes
from kvdisk.config import Config
from kvdisk.device.control import STORE_FILE
from kvdisk.device.drives import list_directories
from kvdisk.device.gds import gds_unavailable
from kvdisk.device.paths import DIRECTORY_MODE, allocated_bytes
from kvdisk.errors import ConfigError, DeviceError, KvdiskError
from kvdisk.geometry import Geometry
from kvdisk.remote.base import ObjectOp, Objects, RemoteObject, Result
from kvdisk.remote.s3 import DENIED, SCHEMES, S3Bucket, why_failed
from kvdisk.worker.arena import host_memory_bytes

CONNECTOR = "KVDiskConnector"
TRIAL_BYTES = 1 << 20
_POLL_S = 1.0


@dataclass
class Directory:
    """A directory of ``store_dirs``, as an engine would have it.

    ``state``: "a store", "empty", or "to be made". ``free_bytes``: with what the store holds
    already. ``wanted_bytes``: its part of ``nvme_bytes``. Of the drive: ``direct`` (O_DIRECT),
    ``device`` and bytes per second; None: it could not be measured.
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
    """What the remote store did with an object of so many bytes, in seconds; None: it was not
    tried, or failed. ``missing_s``: to say that an object is not there."""

    url: str
    object_bytes: int = TRIAL_BYTES
    missing_s: float | None = None
    put_s: float | None = None
    get_s: float | None = None


@dataclass
class Answer:
    """All that is shown. ``problems``: sentences; an engine starts all the same. ``token_bytes``:
    of one token on the drive; None without a model."""

    cpu_bytes: int
    nvme_bytes: int | None
    memory_bytes: int
    directories: list[Directory]
    problems: list[str]
    token_bytes: int | None = None
    cpu: Fit | None = None
    nvme: Fit | None = None
    remote: Trial | None = None
    ok: bool = field(init=False, default=True)
    json_version: int = 1
    kvdisk_version: str = __version__


def check(
    file: Annotated[
        Path,
        typer.Argument(metavar="CONFIG.json", help="What --kv-transfer-config is given, or kvdisk's own part of it."),
    ],
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG", help="A model's directory, or its config.json, to count in its tokens.", readable=False
        ),
    ] = None,
    tp: Annotated[int, typer.Option("--tp", metavar="N", min=1, max=MOST_RANKS, help="Tensor-parallel size.")] = 1,
    kv_dtype: Annotated[str, typer.Option(help="As vLLM's kv_cache_dtype: auto, fp8, bfloat16 ...")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Say whether an engine can start with a configuration, and what it would have.

    Looks at every setting, at the directories (owner, mode, room), and at the
    drives: O_DIRECT, and how fast they are beside what a token of the model
    takes; and tries the remote store with an object of its own. Run it as the
    engine's user, in its container. It makes nothing; the file that is measured
    on goes at once, and so does the object, where the credentials may delete.

    [bold]Exit codes[/bold]

    [cyan]0[/cyan]  an engine can start

    [cyan]1[/cyan]  it can, and something is not as it should be; the report says what

    [cyan]2[/cyan]  it cannot, and one sentence says why; or wrong usage
    """
    try:
        config = check_settings(read_settings(file))
        if config.device == "gds" and (why := gds_unavailable()):
            raise ConfigError(f"device 'gds' cannot be used: {why}.")
        geometry = None if model is None else read_model(model, None, kv_dtype).geometry(tp)
        answer = look(config, geometry)
    except KvdiskError as error:
        raise refusal(str(error).rstrip(".") + ".") from None
    if as_json:
        print_json(answer)
    else:
        _print(answer)
    raise typer.Exit(Exit.FINE if answer.ok else Exit.WRONG)


def read_settings(file: Path) -> Mapping[str, Any]:
    """Return kvdisk's settings from a file. Raises ConfigError."""
    try:
        whole = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is no JSON: {error}.") from None
    found = _settings_in(whole)
    if not isinstance(found, dict):
        raise ConfigError(f"{file} has no settings of {CONNECTOR}.")
    return found


def _settings_in(whole: Any) -> Any:
    """Return the settings in what vLLM takes for a connector, alone or among several; or it is
    they."""
    if not isinstance(whole, dict) or "kv_connector" not in whole:
        return whole
    inner = whole.get("kv_connector_extra_config", {})
    if whole["kv_connector"] == "MultiConnector" and isinstance(inner, dict):
        children = [child for child in inner.get("connectors", []) if isinstance(child, dict)]
        whole = next((child for child in children if child.get("kv_connector") == CONNECTOR), {"kv_connector": None})
        inner = whole.get("kv_connector_extra_config", {})
    if whole["kv_connector"] != CONNECTOR:
        return None
    if whole.get("kv_role") != "kv_both":
        raise ConfigError(f"kvdisk does not support the role {whole.get('kv_role')}; set kv_role to kv_both.")
    return inner


def look(config: Config, geometry: Geometry | None) -> Answer:
    """Return what an engine of this configuration would have. Raises ConfigError where nothing fits
    into a tier, DeviceError where a drive fails."""
    memory_bytes = host_memory_bytes()
    answer = Answer(config.cpu_bytes, config.nvme_bytes, memory_bytes, [], [])
    if geometry is not None:
        answer.cpu = fit_cpu(geometry, config.cpu_bytes) if config.cpu_bytes else None
        if config.nvme_bytes is not None:
            answer.nvme = fit_nvme(geometry, config.nvme_bytes, len(config.store_dirs))
        answer.token_bytes = round(token_bytes(geometry, geometry.part_count))
    if config.cpu_bytes > memory_bytes:
        answer.problems.append(
            f"cpu_bytes is {in_words(config.cpu_bytes)}, and this machine has {in_words(memory_bytes)} of memory"
        )
    for path in list_directories(config.store_dirs) if config.store_dirs else ():
        answer.directories.append(_look_at(path, config, geometry, answer.problems))
    if config.remote is not None:
        answer.remote = Trial(config.remote)
        answer.problems += [f"{config.remote}: {what}" for what in _try_remote(config, answer.remote)]
    answer.ok = not answer.problems
    return answer


def _look_at(path: Path, config: Config, geometry: Geometry | None, problems: list[str]) -> Directory:
    """Return what there is to say of a directory that an engine could use; add what is not as it
    should be."""
    there = path.exists()
    place = path if there else path.parent
    room, status = os.statvfs(place), place.stat()
    found = Directory(
        path,
        "to be made" if not there else "a store" if (path / STORE_FILE).exists() else "empty",
        status.st_uid if there else os.geteuid(),
        status.st_mode & 0o7777 if there else DIRECTORY_MODE,
        room.f_bavail * room.f_frsize + (allocated_bytes(path) if there else 0),
        (config.nvme_bytes or 0) // len(config.store_dirs),
    )
    if found.free_bytes < found.wanted_bytes:
        problems.append(
            f"{path} has room for {in_words(found.free_bytes)}, and its part of nvme_bytes is "
            f"{in_words(found.wanted_bytes)}: the tier keeps what there is room for"
        )
    try:
        bench = measure(place, geometry, None)
    except (ConfigError, DeviceError) as error:
        problems.append(f"the drive of {path} was not measured: {str(error).rstrip('.')}")
        return found
    found.direct, found.device = bench.direct, bench.device
    found.read_bytes_per_s, found.write_bytes_per_s = bench.read, bench.write
    if not bench.direct:
        problems.append(f"{path} takes no O_DIRECT: blocks go through the kernel's cache, and take memory there")
    if bench.device == "posix-threads":
        problems.append(f"threads would move blocks of {path}, not the kernel's queue, and slower: {bench.why}")
    return found


class _Heard(logging.Handler):
    """Keeps what the client of the remote store says last, which an engine would log."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging.Handler``."""
        self.last = record.getMessage()


def _try_remote(config: Config, trial: Trial) -> list[str]:
    """Use the remote store as an engine does; return what is wrong."""
    problems: list[str] = []
    bucket = None
    if trial.url.partition("://")[0] in SCHEMES:
        bucket = S3Bucket(trial.url, dict(config.remote_options), deadline_s=config.remote_deadline_s)
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
    """Return how long a request took, in seconds; None, with a problem more, where it did not bring
    what it should."""
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
        lines.add_row(name, f"{in_words(size_bytes)}{tokens}" if size_bytes else "none")
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
    print_list("Not as it should be", answer.problems, console, None, "")
    later = answer.remote is not None and answer.remote.missing_s is None
    console.print(f"An engine can start with this{', and shares blocks once the remote store works' if later else ''}.")


def _told(trial: Trial) -> str:
    times = (("written", trial.put_s), ("read", trial.get_s), ("said to be missing", trial.missing_s))
    said = [f"{what} in {taken_s * 1000:,.0f} ms" for what, taken_s in times if taken_s is not None]
    return f"{in_words(trial.object_bytes)} {', '.join(said)}" if said else "it cannot be used now"


def _rate(bytes_per_s: float, answer: Answer) -> str:
    tokens = f" = {number(int(bytes_per_s / answer.token_bytes))} tokens/s" if answer.token_bytes else ""
    return f"{bytes_per_s / 1e6:,.0f} MB/s{tokens}"
