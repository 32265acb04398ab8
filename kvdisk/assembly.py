# SPDX-License-Identifier: Apache-2.0
"""The only place that picks concrete classes. It builds the scheduler's half and the worker's."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvdisk import __version__
from kvdisk.background import Background
from kvdisk.blocks import Tier
from kvdisk.config import Config, find_own
from kvdisk.context import SchedulerContext
from kvdisk.device.base import Device
from kvdisk.device.control import JointCap, is_store
from kvdisk.device.drives import check_directories, list_directories
from kvdisk.device.gds import GdsDevice, gds_unavailable
from kvdisk.device.home import Home
from kvdisk.device.listing import of_other_namespaces, readable_indexes
from kvdisk.device.mounts import check_mount
from kvdisk.device.paths import may
from kvdisk.device.posix import PosixDevice
from kvdisk.device.probe import choose_device
from kvdisk.device.store import Store
from kvdisk.device.telemetry_file import write_telemetry
from kvdisk.device.uses import Uses, write_uses
from kvdisk.engine_store import EngineStore, make_budget, nvme_layout_in, open_engine_store, short
from kvdisk.errors import ConfigError, DeviceError, KvdiskError, StoreLocked
from kvdisk.geometry import FILE_EPOCH, Geometry, GroupGeometry, Namespace, UnitChoice
from kvdisk.identity import Identity, Named
from kvdisk.index.lmdb_index import LmdbIndex
from kvdisk.index.neighbour_reader import NeighbourReader
from kvdisk.late_identity import LOOK_S as IDENTITY_LOOK_S
from kvdisk.late_identity import LateIdentity
from kvdisk.mailbox import Mailbox
from kvdisk.manager.admission import AdmissionPolicy, make_admission
from kvdisk.manager.eviction import EvictionPolicy
from kvdisk.manager.manager import TierManager, make_remote_budget
from kvdisk.manager.nvme import NvmeSpace
from kvdisk.manager.parts import Parts
from kvdisk.manager.store_policy import StorePolicy, make_store_policy
from kvdisk.manager.tiers import MemorySpace, Tiers
from kvdisk.messages import HomeSpec, JobKind
from kvdisk.orders import LOOK_S as ORDERS_S
from kvdisk.orders import Orders
from kvdisk.remote.base import object_name
from kvdisk.remote.client import open_remote
from kvdisk.remote.reader import RemoteReader
from kvdisk.request_trace import WRITE_S as TRACE_S
from kvdisk.request_trace import RequestTrace, check_trace
from kvdisk.salts import SaltDigests, make_salt_key
from kvdisk.telemetry import LOG_S, WRITE_S, Telemetry, log_request
from kvdisk.upkeep import Upkeep
from kvdisk.worker.direct import choose_direct
from kvdisk.worker.host_memory import Deployment, check_host_memory

if TYPE_CHECKING:
    import torch

    from kvdisk.worker.arena import Arena
    from kvdisk.worker.copier import CudaCopier, CudaLanes, LayerBlocks
    from kvdisk.worker.direct import Direct
    from kvdisk.worker.gpu_staging import GpuStaging
    from kvdisk.worker.mover import Mover
    from kvdisk.worker.populate import Populating
    from kvdisk.worker.row_memory import Rows

logger = logging.getLogger("kvdisk")


class MemoryTier(NamedTuple):
    """A tier in host memory. ``size_key`` and ``admission_key``: the configuration keys of its
    size, in bytes over all ranks, and of its admission."""

    tier: Tier
    size_key: str
    admission_key: str

    def bytes_in(self, config: Config) -> int:
        """Return the tier's size; 0 where there is no such tier."""
        size: int = getattr(config, self.size_key)
        return size


MEMORY_TIERS = (MemoryTier(Tier.CPU, "cpu_bytes", "cpu_admission"),)
"""The tiers in memory, the fastest first. Another tier is a row here, a member of ``Tier``, and its
keys in ``Config``."""

_COUNTS = ((10**9, " G"), (10**6, " M"), (10**3, " k"))
_DEFAULT_STAGING_BYTES, _DEFAULT_GPU_STAGING_BYTES = 128 << 20, 64 << 20
_GPU_SCRATCH_BYTES = 64 << 20
_LEAST_STAGING_SLOTS = 8
_MOST_CHECKSUM_THREADS = 4
"""More would not help: one thread verifies 10 to 15 GB/s from memory, and a link has up to 55."""
_WARNED_OF: set[Path] = set()
_EASY_BYTES = 64 << 10
"""Bytes of a block that is assumed where the model's blocks are smaller or not known: the index of
small blocks takes more, so the least store is larger."""
_UPKEEP_INTERVAL_S = 30.0
IDENTITY_WAIT_S = 5.0
"""How long a start waits for the identity of the weights. Small models are read in that time."""
USES_S = 600.0
"""Seconds between two writings of the USES file while uses go on changing."""
USES_LOOK_S = 5.0
USES_AT_ONCE = 10_000
"""Blocks whose uses may be written at each pause: 160 KB every ``USES_LOOK_S``."""


@dataclass(frozen=True, slots=True)
class SchedulerHalf:
    """The manager and what it was built with. ``close`` commits and releases the engine store."""

    manager: TierManager
    engine_store: EngineStore | None
    neighbours: NeighbourReader | None
    remote: RemoteReader | None
    telemetry: Telemetry
    trace: RequestTrace | None
    backgrounds: Sequence[Background]
    mailbox: Mailbox = field(default_factory=Mailbox)
    salts: SaltDigests = field(default_factory=lambda: SaltDigests(make_salt_key(), is_kept=False))

    def close(self) -> None:
        """Commit what is queued, note a clean end, and release the engine store. The workers are
        gone already."""
        for background in self.backgrounds:
            background.close()
        self.telemetry.log_end()
        for reader in (self.neighbours, self.remote):
            if reader is not None:
                reader.close()
        if self.engine_store is not None:
            self.engine_store.close()

    @property
    def home(self) -> Home | None:
        """The hold on the engine store; None where there is none."""
        return None if self.engine_store is None else self.engine_store.home

    @property
    def index(self) -> LmdbIndex | None:
        """The engine's index; None where there is no engine store."""
        return None if self.engine_store is None else self.engine_store.index

    @property
    def nvme(self) -> NvmeSpace | None:
        """The NVMe tier; None where there is no engine store."""
        return None if self.engine_store is None else self.engine_store.nvme


def check_settings(values: Mapping[str, Any]) -> Config:
    """Return the Config of a user's values, checked as far as possible without a model: keys,
    values, classes, directories.

    Writes nothing, and builds no object of a user's class. For use before weights are loaded.
    Raises ConfigError; CorruptRecord or DeviceError for what is wrong in a directory.
    """
    config = Config.from_mapping(values)
    admissions = {"cpu_admission": AdmissionPolicy, "nvme_admission": AdmissionPolicy}
    protocols: dict[str, type] = {"store_policy": StorePolicy, "eviction": EvictionPolicy, **admissions}
    for key, protocol in protocols.items():
        if ":" in getattr(config, key):
            find_own(key, getattr(config, key), protocol)
    if config.store_dirs:
        check_directories(config.store_dirs)
    if config.remote is not None:
        open_remote(config).close()
    if config.trace_file is not None and not may(f"{config.trace_file.parent}/", os.W_OK | os.X_OK):
        raise ConfigError(f"trace_file {str(config.trace_file)!r} lies in no directory that this user can write in.")
    return config


def check_start(config: Config, engines: int = 1, *, has_memory: bool = True) -> list[str]:
    """Return what engines of a checked configuration would start without, in sentences. Writes
    nothing, and builds nothing of a model's.

    Unlike ``check_settings`` it looks at what only one engine may have, so it is not for an engine,
    of which several processes check their settings. ``engines``: data-parallel ranks that have this
    configuration. ``has_memory``: they have a tier in memory, or vLLM has one. Raises ConfigError,
    CorruptRecord, StoreLocked, DeviceError where none starts.
    """
    for rank in range(engines if config.trace_file is not None else 0):
        assert config.trace_file is not None
        check_trace(_file_of_rank(config.trace_file, rank))
    if not config.store_dirs or not is_store(list_directories(config.store_dirs)[0]):
        return []
    store = Store.open(config.store_dirs, create=False, need_all=False)
    try:
        store.look()
    except DeviceError as error:
        if not goes_on_without_nvme(error, has_memory=has_memory):
            raise
        return [f"an engine would go on without its NVMe tier: {error}"]
    return []


def goes_on_without_nvme(error: DeviceError, *, has_memory: bool) -> bool:
    """Whether an engine that gets no engine store for this reason starts all the same."""
    return has_memory and not error.is_of_process


def warn_of_file_systems(config: Config) -> None:
    """Warn, once in a process, of what a user must know about the file systems of a checked
    configuration. Raises ConfigError."""
    for path in list_directories(config.store_dirs) if config.store_dirs else ():
        said = check_mount(path)
        if said and path not in _WARNED_OF:
            _WARNED_OF.add(path)
            logger.warning("%s", said)


def check_sizes(config: Config, deployment: Deployment, geometry: Geometry | None = None) -> None:
    """Raise ConfigError where a tier cannot hold one block of each kind, a budget allows none, or
    this host's memory is too small for all ranks on it together. For use before weights are loaded.

    ``geometry``: the model's, or one whose blocks are no larger than the model's; None where
    nothing is known about it.
    """
    ranks = deployment.ranks
    for row in MEMORY_TIERS:
        memory_slots_in(row.bytes_in(config), geometry or Geometry((GroupGeometry(0, 1, 1),), ranks, 1), row.size_key)
    if config.nvme_bytes is not None:
        easy = geometry
        if easy is None or easy.slot_sizes[-1] < _EASY_BYTES:
            easy = Geometry((GroupGeometry(0, 1, _EASY_BYTES),), ranks, 1, replicated=ranks > 1)
        nvme_layout_in(config.nvme_bytes, config.segment_bytes, easy, len(config.store_dirs))
    if geometry is not None:
        make_budget(config, geometry)
        make_remote_budget(config, geometry)
    check_host_memory(_host_bytes_of_rank(config, geometry, ranks), deployment)


def _host_bytes_of_rank(config: Config, geometry: Geometry | None, ranks: int) -> int:
    """Return the bytes of memory tiers and staging of one rank."""
    sizes = [row.bytes_in(config) for row in MEMORY_TIERS]
    if geometry is None:
        staging_bytes = _DEFAULT_STAGING_BYTES if config.staging_bytes is None else config.staging_bytes
        return sum(sizes) // ranks + staging_bytes
    slots = [*map(geometry.memory_slots, sizes), _host_staging_slots(config, geometry)]
    return sum(size * count for each in slots for size, count in zip(geometry.slot_sizes, each, strict=True))


def assemble_scheduler(
    config: Config,
    geometry: Geometry,
    context: SchedulerContext,
    identity: Identity | None,
    data_parallel_rank: int | None = None,
    joint: JointCap | None = None,
) -> SchedulerHalf:
    """Build the scheduler's wing. With ``store_dirs``, take an engine store and fill the catalog
    from its index.

    ``identity``: None where there is neither an NVMe tier nor a remote store. One that is not known
    within IDENTITY_WAIT_S is taken in once it is. ``data_parallel_rank``: of this engine among
    those with its settings; None where it is alone. ``joint``: what bounds its engine store
    together with others. Waits for the drive, so for the start only.
    Where a drive refuses an engine store, the CPU tier serves alone. Raises ConfigError,
    StoreLocked, DeviceError.
    """
    parts = Parts.make(config, geometry, context)
    known = None if identity is None else _wait_for(identity, parts)
    memory = _make_memory_tiers(parts)
    model = "" if identity is None else str(identity.guess.description.get("model", ""))
    trace = _make_trace(config.trace_file, data_parallel_rank, geometry, model)
    engine_store = neighbours = None
    salts, others = SaltDigests(make_salt_key(), is_kept=False), 0
    if config.store_dirs:
        assert identity is not None
        store = Store.open(config.store_dirs)
        try:
            engine_store = open_engine_store(
                store, parts, known or identity.guess, is_known=known is not None, joint=joint
            )
            home = engine_store.home
            parts.state.fingerprint = home.fingerprint
            salts = _keep_salts(store, salts)
            parts.catalog.keeps_tenants = salts.is_kept
            find_others = partial(readable_indexes, store, home.record.description, home)
            neighbours = NeighbourReader(find_others)
            others = of_other_namespaces(store, home.fingerprint, model) if home.fresh and model and known else 0
        except DeviceError as error:
            if not goes_on_without_nvme(error, has_memory=bool(memory)):
                raise
            if engine_store is not None:
                engine_store.close()
                engine_store = None
            logger.warning("kvdisk goes on without its NVMe tier until the next start: %s", error)
    nvme = None if engine_store is None else engine_store.nvme
    remote = None
    if config.remote is not None:
        remote = _make_remote_reader(config, parts)
    if identity is not None and (nvme is None or known is None):
        parts.transfers.add(JobKind.OPEN_HOME, [], [], home=HomeSpec("", parts.state.fingerprint))  # for slot headers
    tell = partial(log_request, logging.INFO if config.log_requests else logging.DEBUG)
    policy = make_store_policy(config.store_policy)
    manager = TierManager(parts, Tiers(*memory, nvme), policy, time.time_ns(), neighbours, tell, remote)
    _log_start(parts, memory, engine_store)
    if others:
        text = "kvdisk cannot use other engine stores of this model (%d), which are of another namespace: see "
        logger.info(text + "kvdisk inspect.", others)
    telemetry = _make_telemetry(manager, geometry, engine_store, model, data_parallel_rank)
    mailbox = Mailbox()
    backgrounds = _start_backgrounds(telemetry, manager, engine_store, mailbox, geometry.shard_count)
    if trace is not None:
        backgrounds.append(Background([(TRACE_S, trace.write)], last=[trace.close]))
    if identity is not None and known is None:
        late = LateIdentity(identity, parts, manager, engine_store, mailbox)
        backgrounds.append(Background([(IDENTITY_LOOK_S, late.look)]))
    return SchedulerHalf(manager, engine_store, neighbours, remote, telemetry, trace, backgrounds, mailbox, salts)


def _wait_for(identity: Identity, parts: Parts) -> Named | None:
    """Return what is known of an engine's identity; None where it is still looked for, or cannot be
    found in this run: ``LateIdentity`` says what comes of that."""
    known = None
    with suppress(KvdiskError, OSError):
        known = identity.wait(IDENTITY_WAIT_S)
    parts.state.is_identified = known is not None
    parts.state.fingerprint = (known or identity.guess).fingerprint
    return known


def _start_backgrounds(
    telemetry: Telemetry, manager: TierManager, engine_store: EngineStore | None, mailbox: Mailbox, shard_count: int
) -> list[Background]:
    """Start the threads for what is done now and then beside the engine's steps."""
    jobs: list[tuple[float, Callable[[], None]]] = [(WRITE_S, telemetry.write), (LOG_S, telemetry.log)]
    last = [job for _, job in jobs]
    if engine_store is None:
        return [Background(jobs, last=last)]
    home, nvme = engine_store.home, engine_store.nvme
    writer = _UsesWriter(nvme.uses, home)
    upkeep = Upkeep(engine_store.store, home, nvme, mailbox, shard_count)
    return [
        Background([*jobs, (USES_LOOK_S, writer.look)], last=[*last, writer.write]),
        # Each on a thread of its own: any of the drives may hold it up.
        Background([(_UPKEEP_INTERVAL_S, upkeep.look)], first_s=_UPKEEP_INTERVAL_S),
        Background([(ORDERS_S, Orders(home, manager, nvme, mailbox).look)]),
    ]


def _keep_salts(store: Store, otherwise: SaltDigests) -> SaltDigests:
    """Return digests of salts by the store's key. Return ``otherwise`` where the drive, which may
    be full, does not take a key."""
    try:
        return SaltDigests(store.keep_salt_key())
    except (DeviceError, StoreLocked) as error:
        text = "kvdisk does not record on NVMe which tenant a block belongs to until the next start: %s"
        logger.warning(text, error)
        return otherwise


def _make_remote_reader(config: Config, parts: Parts) -> RemoteReader:
    """Return the reader that asks the remote store for the first rank's objects: a load fails where
    one rank's object is missing."""
    state, count = parts.state, parts.geometry.shard_count
    return RemoteReader(
        open_remote(config), lambda key: object_name(Namespace(state.fingerprint, FILE_EPOCH), key, 0, count)
    )


def memory_slots_in(size: int, geometry: Geometry, size_key: str = "cpu_bytes") -> Sequence[int]:
    """Return the slots by size class of a tier in memory of ``size`` bytes. Raises ConfigError
    where it cannot hold a block of each class; with 0 bytes there is no tier."""
    slots = geometry.memory_slots(size)
    if size and not all(slots):
        largest = max(geometry.slot_sizes) * geometry.rank_count
        raise ConfigError(
            f"{size_key} {size} is too small for a block of each size; the largest takes {largest} bytes."
        )
    return slots


def unit_choice(config: Config, longest_tokens: int) -> UnitChoice:
    """Return what decides how many of the engine's blocks are one. ``longest_tokens``: of the
    longest prompt that the engine takes."""
    memory = tuple(row.bytes_in(config) for row in MEMORY_TIERS)
    drive = (config.nvme_bytes or 0, config.nvme_write_bytes_per_day or 0)
    return UnitChoice(config.unit_tokens, longest_tokens, memory, drive)


def _make_memory_tiers(parts: Parts) -> list[MemorySpace]:
    """Return the tiers in memory that the configuration asks for. Raises ConfigError."""
    config, found = parts.config, []
    for row in MEMORY_TIERS:
        slots = memory_slots_in(row.bytes_in(config), parts.geometry, row.size_key)
        admission = make_admission(getattr(config, row.admission_key), parts.history, row.admission_key)
        if any(slots):
            found.append(MemorySpace(parts, slots, admission, row.tier))
    return found


def _file_of_rank(path: Path, data_parallel_rank: int | None) -> Path:
    """Return a file's path for one of the data-parallel engines that share a setting: the first one
    has the name as it is."""
    return path.with_name(f"{path.stem}-dp{data_parallel_rank}{path.suffix}") if data_parallel_rank else path


def _make_trace(path: Path | None, rank: int | None, geometry: Geometry, model: str) -> RequestTrace | None:
    """Begin the trace of requests, where one is wanted. Its blocks are those that vLLM hashes, in
    all groups together. Raises ConfigError."""
    if path is None:
        return None
    tokens = geometry.hash_tokens
    token_bytes = sum(group.payload_bytes / group.block_tokens for group in geometry.groups) * geometry.shard_count
    return RequestTrace(
        _file_of_rank(path, rank), block_tokens=tokens, block_bytes=round(tokens * token_bytes), model=model
    )


class _UsesWriter:
    """Writes the USES file where something has changed since the last time: every ``USES_S``, and
    once nothing has changed from one look to the next, so that the file has the last request before
    a pause. A large file waits longer for that, to spare the drive."""

    def __init__(self, uses: Uses, home: Home) -> None:
        self._uses = uses
        self._home = home
        self._seen = self._written = uses.changes
        self._written_s = time.monotonic()

    def look(self) -> None:
        """Write the file if it is time. Raises OSError."""
        paused, self._seen = self._uses.changes == self._seen, self._uses.changes
        wait_s = min(USES_S, USES_LOOK_S * len(self._uses.table) / USES_AT_ONCE) if paused else USES_S
        if time.monotonic() - self._written_s >= wait_s:
            self.write()

    def write(self) -> None:
        """Write the file if something has changed. Raises OSError."""
        changes = self._uses.changes
        if changes != self._written:
            self._home.when_there(write_uses, self._uses.records())
            self._written, self._written_s = changes, time.monotonic()


def _make_telemetry(
    manager: TierManager,
    geometry: Geometry,
    engine_store: EngineStore | None,
    model: str,
    data_parallel_rank: int | None,
) -> Telemetry:
    home = None if engine_store is None else engine_store.home
    folders = [] if home is None else [folder for folder in home.folders if folder is not None]
    return Telemetry(
        manager.stats,
        manager.gauges,
        model=model,
        ranks=geometry.rank_count,
        data_parallel_rank=data_parallel_rank,
        drives=[str(folder.path.parent.parent) for folder in folders],
        write_file=None if home is None else partial(home.when_there, write_telemetry),
    )


def _log_start(parts: Parts, memory: Sequence[MemorySpace], engine_store: EngineStore | None) -> None:
    """Log in three lines what is kept, where, and how much fits."""
    config, geometry = parts.config, parts.geometry
    per_token = sum(group.payload_bytes / group.tokens_each for group in geometry.groups) * geometry.rank_count
    logger.info("kvdisk %s keeps %s KiB of KV a token.", __version__, short(per_token / 1024))
    sizes = {row.tier: row.bytes_in(config) for row in MEMORY_TIERS}
    tiers = [(sizes[space.tier], space.tier.word, space.capacity) for space in memory]
    found = ""
    if engine_store is not None:
        home, nvme = engine_store.home, engine_store.nvme
        made = "made" if home.fresh else "took over"
        logger.info("kvdisk %s engine store %s in %s.", made, home.id, home.path.parent.parent)
        tiers.append((home.cap_bytes, "NVMe", nvme.capacity))
        found = f"; {len(parts.catalog):,} blocks found"
    elif not config.store_dirs:
        logger.info("kvdisk has no NVMe tier: store_dirs is not set.")
    fits = ", ".join(
        f"{name} {short(size / (1 << 30))} GiB = {_in_words(geometry.tokens_in(slots))} tokens"
        for size, name, slots in tiers
    )
    logger.info("kvdisk ready: %s%s.", fits, found)
    if config.remote is not None:
        logger.info("kvdisk shares blocks with other hosts in %s.", config.remote)


def _in_words(count: int) -> str:
    """Return a count in three digits or fewer: ``131 k``, ``4.9 M``."""
    unit, name = next(((unit, name) for unit, name in _COUNTS if count >= unit), (1, ""))
    return f"{count / unit:.{1 if name and count < 10 * unit else 0}f}{name}"


@dataclass(frozen=True, slots=True)
class WorkerHalf:
    """One rank's mover and the memory it works in."""

    mover: Mover
    memory: tuple[Arena | GpuStaging, ...]
    populating: Populating | None = None

    def close(self) -> None:
        """Finish what the device has started, then release the memory."""
        self.mover.close()
        if self.populating is not None:
            self.populating.close()
        for memory in self.memory:
            memory.close()


def assemble_worker(
    config: Config,
    geometry: Geometry,
    rank: int,
    layers: Sequence[Sequence[torch.Tensor]],
    deployment: Deployment | None = None,
    platform: str = "",
) -> WorkerHalf:
    """Build one rank's wing over vLLM's KV tensors, and start its thread.

    ``layers``: for each group, its layers as uint8 tensors (num_blocks, layer bytes), all on one
    device; a stage of a pipeline may have none of a group. ``deployment``: None: one engine, with
    all its ranks on this host. ``platform``: what of this host decides what the bytes of a block
    mean. Where its scheduler is on another, files that a rank on another platform left stay
    unused.
    """
    from kvdisk.worker.arena import Arena
    from kvdisk.worker.copier import CudaLanes, HostCopier, LayerBlocks
    from kvdisk.worker.copy_check import check_copies
    from kvdisk.worker.files import HomeFiles
    from kvdisk.worker.mover import Mover
    from kvdisk.worker.populate import Populating
    from kvdisk.worker.resources import Resources

    ranks = deployment or Deployment(geometry.rank_count)
    check_host_memory(_host_bytes_of_rank(config, geometry, geometry.rank_count), ranks)
    device = next(layer.device for group in layers for layer in group)
    on_gpu = device.type == "cuda"
    groups = [LayerBlocks(group, sizes.gpu_blocks) for group, sizes in zip(layers, geometry.groups, strict=True)]
    lanes = CudaLanes(device.index) if on_gpu else None
    copier = HostCopier(groups) if lanes is None else _gpu_copier(groups, lanes, geometry)
    with ExitStack() as undo:  # pinning goes on, on a thread, until an arena is closed
        staging = Arena(geometry.slot_sizes, _host_staging_slots(config, geometry), pin=on_gpu)
        undo.callback(staging.close)
        undo.callback(copier.settle)  # before its memory goes
        check_copies(copier, staging, geometry.size_classes)  # before the rest is pinned, which holds CUDA up
        arenas: dict[Tier, Arena] = {}
        for row in MEMORY_TIERS:
            if size := row.bytes_in(config):
                arenas[row.tier] = Arena(geometry.slot_sizes, geometry.memory_slots(size), on_gpu)
                undo.callback(arenas[row.tier].close)
        files = HomeFiles(
            config.store_dirs or None, rank, geometry.rank_count, sharers=geometry.ranks_of_shard, platform=platform
        )
        directories = list_directories(config.store_dirs) if config.store_dirs else ()
        host = choose_device(config.device, directories)
        disk, direct = _pair_with_gpu(replace(config, store_dirs=directories), geometry, lanes, host)
        remote = None if config.remote is None else open_remote(config)
        threads = _checksum_threads(geometry.rank_count) if on_gpu else 0
        resources = Resources(
            geometry, rank, arenas, staging, copier, disk, files, direct, remote, checksum_threads=threads
        )
        mover = Mover(resources, io_deadline_s=config.io_deadline_s)
        undo.pop_all()
    memory: list[Arena | GpuStaging] = [*arenas.values(), staging]
    memory += [] if direct is None else [direct.staging]
    populating = None if on_gpu else Populating([staging, *arenas.values()])
    return WorkerHalf(mover, tuple(memory), populating)


def assemble_row_worker(config: Config, geometry: Geometry, memory: Rows | Sequence[Rows]) -> WorkerHalf:
    """Build the wing of an engine's only rank, whose blocks are rows of host memory, and start its
    thread. ``memory``: see ``RowMemory``. Imports no torch. Raises ConfigError.
    """
    from kvdisk.worker.arena import Arena
    from kvdisk.worker.copier_base import RowCopier
    from kvdisk.worker.files import HomeFiles
    from kvdisk.worker.mover import Mover
    from kvdisk.worker.populate import Populating
    from kvdisk.worker.resources import Resources
    from kvdisk.worker.row_memory import RowMemory

    assert geometry.rank_count == 1 and config.cpu_bytes == 0, "rows are of one rank, without a CPU tier"
    check_host_memory(_host_bytes_of_rank(config, geometry, 1), Deployment(1))
    copier = RowCopier(RowMemory(memory), [group.pieces for group in geometry.groups])
    with ExitStack() as undo:
        staging = Arena(geometry.slot_sizes, _host_staging_slots(config, geometry), pin=False)
        undo.callback(staging.close)
        files = HomeFiles(config.store_dirs or None, 0, 1)
        device = choose_device(config.device, list_directories(config.store_dirs) if config.store_dirs else ())
        remote = None if config.remote is None else open_remote(config)
        resources = Resources(geometry, 0, {}, staging, copier, device, files, remote=remote, checksum_threads=1)
        mover = Mover(resources, io_deadline_s=config.io_deadline_s)
        undo.pop_all()
    return WorkerHalf(mover, (staging,), Populating([staging]))


def _gpu_copier(groups: Sequence[LayerBlocks], lanes: CudaLanes, geometry: Geometry) -> CudaCopier:
    """Return the copier of a GPU. Raises ConfigError where vLLM has left no room for scratch."""
    from kvdisk.worker.copier import CudaCopier

    scratch_bytes = max(_GPU_SCRATCH_BYTES, 2 * geometry.slot_sizes[-1])
    try:
        return CudaCopier(groups, lanes, scratch_bytes)
    except RuntimeError as error:  # torch's, of a full GPU, is one
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(
            f"kvdisk needs {scratch_bytes} bytes of the GPU beside the KV cache, and cannot get them:"
            f" lower vLLM's gpu_memory_utilization ({why})."
        ) from error


def _checksum_threads(rank_count: int) -> int:
    """Return the number of threads with which each rank verifies blocks that go to a GPU: as many
    as reach the speed of its link, and at most half of the processors."""
    count = os.cpu_count() or 1
    with suppress(OSError):
        count = len(os.sched_getaffinity(0))
    return max(1, min(_MOST_CHECKSUM_THREADS, count // (2 * rank_count)))


def _host_staging_slots(config: Config, geometry: Geometry) -> list[int]:
    return _staging_slots(config.staging_bytes, _DEFAULT_STAGING_BYTES, geometry)


def _staging_slots(byte_count: int | None, default: int, geometry: Geometry) -> list[int]:
    """Return the slots of each size class in staging of ``byte_count`` bytes; None stands for the
    default."""
    wanted = default if byte_count is None else byte_count
    return [
        max(_LEAST_STAGING_SLOTS, int(wanted * share) // size)
        for share, size in zip(geometry.shares, geometry.slot_sizes, strict=True)
    ]


def _pair_with_gpu(
    config: Config, geometry: Geometry, lanes: CudaLanes | None, disk: PosixDevice
) -> tuple[Device, Direct | None]:
    """Return the device for all of a worker's memory, and the direct way between drive and GPU
    where there is one.

    Raises ConfigError where ``device`` demands that way, and it cannot be used.
    """
    demanded = config.device == "gds"
    if not config.store_dirs or not (demanded or (config.device == "auto" and lanes is not None)):
        return disk, None
    if lanes is None:
        why = "the model is not on a GPU"
    elif config.gpu_staging_bytes == 0:
        why = "gpu_staging_bytes is 0"
    elif unavailable := gds_unavailable():
        why = unavailable
    else:
        choice = choose_direct(
            config.store_dirs[0],
            geometry.slot_sizes,
            _staging_slots(config.gpu_staging_bytes, _DEFAULT_GPU_STAGING_BYTES, geometry),
            lanes,
            GdsDevice,
            always=demanded,
        )
        why = choice.line
        if choice.direct is not None or not demanded:
            logger.info("%s", choice.line)
            if choice.direct is None:
                return disk, None
            disk.close()
            return GdsDevice(kernel_queue=disk.kernel_queue), choice.direct
    if demanded:
        disk.close()
        raise ConfigError(f"device 'gds' cannot be used: {why}.")
    logger.info("kvdisk does not use GPUDirect Storage: %s", why)
    return disk, None
