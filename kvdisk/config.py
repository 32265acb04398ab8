# SPDX-License-Identifier: Apache-2.0
"""One frozen ``Config``, read once from ``kv_connector_extra_config``. A wrong value is one clear
sentence at the start."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kvdisk.errors import ConfigError
from kvdisk.geometry import AUTO, OFF

_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgtp", start=1):  # as SI ("GB") and IEC ("GiB") say, and Kubernetes ("G", "Gi")
    _UNITS |= dict.fromkeys((_prefix, f"{_prefix}b"), 1000**_power)
    _UNITS |= dict.fromkeys((f"{_prefix}i", f"{_prefix}ib"), 1024**_power)

STORE_POLICIES = ("on_compute", "on_preemption", "spillover")
DEVICES = ("auto", "posix", "gds")
BUCKETS = {"s3": "aws_", "gs": "google_", "az": "azure_"}
"""The schemes of buckets in ``remote``, and what names of their settings may begin with, as obstore
has it."""
REMOTES = (*BUCKETS, "mooncake")
CODECS = ("zstd-planes",)
EVICTIONS = ("learned", "lru")
ON_RESET = ("epoch", "keep")
_NEAR_MISS = 0.8
"""The likeness, of 1, from which on an unknown key is taken for a misspelt one."""
_REUSE = r"reuse\(([1-9]|1[0-6])\)"
_CLASS_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def parse_bytes(key: str, value: Any) -> int:
    """Read a size: an integer of bytes or text such as ``"500GiB"``, ``"500Gi"`` or ``"1.5TB"``.
    Capitals do not matter, except that ``m`` alone is no unit: elsewhere it means a thousandth.
    Raises ConfigError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d+)?)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in _UNITS or match[2] == "m":
        raise ConfigError(f"{key} must be a size in bytes such as 1073741824 or '500GiB', not {value!r}.")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def parse_unit(key: str, value: Any) -> int | str:
    """Read the tokens of a unit: a number, also as text, ``AUTO`` or ``OFF``. Raises
    ConfigError."""
    if value in (AUTO, OFF) or (type(value) is int and value > 0):
        return value  # type: ignore[no-any-return]
    if isinstance(value, str) and value.isdecimal() and int(value):
        return int(value)
    raise ConfigError(f"{key} must be '{AUTO}', '{OFF}' or a number of tokens, not {value!r}.")


def _parse_dirs(key: str, value: Any) -> tuple[Path, ...]:
    listed = [value] if isinstance(value, str | Path) else value
    if not isinstance(listed, list | tuple) or not listed or not all(isinstance(d, str | Path) and d for d in listed):
        raise ConfigError(f"{key} must be a directory, or a list of directories, not {value!r}.")
    found = tuple(Path(directory) for directory in listed)
    for path in found:
        if not path.is_absolute():
            raise ConfigError(f"{key} must be an absolute path, not {str(path)!r}.")
        if found.count(path) > 1:
            raise ConfigError(f"{key} lists {str(path)!r} twice.")
    return found


def _checked(
    must_be: str, accepts: Callable[[Any], object], read: Callable[[Any], Any] = lambda value: value
) -> Callable[[str, Any], Any]:
    """Return a parser that raises ConfigError for a value that ``accepts`` refuses, and otherwise
    returns what ``read`` makes of it."""

    def parse(key: str, value: Any) -> Any:
        if not accepts(value):
            raise ConfigError(f"{key} must be {must_be}, not {value!r}.")
        return read(value)

    return parse


def _parse_options(key: str, value: Any) -> tuple[tuple[str, str], ...]:
    """Return the options, by name. What is wrong is named and not shown: it may be a secret."""
    must_be = f"{key} must be an object of text by name, such as {{'aws_region': 'us-east-1'}}"
    if not isinstance(value, Mapping):
        raise ConfigError(f"{must_be}, not a {type(value).__name__}.")
    for name, text in value.items():
        if not (isinstance(name, str) and isinstance(text, str)):
            raise ConfigError(f"{must_be}, not a {type(text).__name__} as that of {name!r}.")
    return tuple(value.items())


def _is_class_name(value: Any) -> bool:
    return isinstance(value, str) and _CLASS_NAME.fullmatch(value) is not None


def _is_admission(value: Any) -> bool:
    known = rf"all|learned|{_REUSE}"
    return isinstance(value, str) and (re.fullmatch(known, value) is not None or _is_class_name(value))


def _one_of(choices: tuple[str, ...], also: str = "", accepts: Callable[[Any], bool] = lambda _: False) -> Any:
    listed = ", ".join(map(repr, choices))
    return _checked(f"one of {listed}{also}", lambda value: value in choices or accepts(value))


_parse_seconds = _checked(
    "a number of seconds, fewer than 2**31", lambda value: type(value) in {int, float} and 0 <= value < 2**31, float
)
_parse_age = _checked(
    "a number of seconds, 600 or more", lambda value: type(value) in {int, float} and 600 <= value < 2**32, float
)
_parse_share = _checked(
    "a number from 0 to 0.5", lambda value: type(value) in {int, float} and 0 <= value <= 0.5, float
)
_parse_salt_share = _checked(
    "a number above 0, and 1 at most", lambda value: type(value) in {int, float} and 0 < value <= 1, float
)
_parse_file = _checked(
    "the absolute path of a file",
    lambda value: isinstance(value, str | Path) and Path(value).is_absolute() and Path(value).name,
    Path,
)
_parse_flag = _checked("true or false", lambda value: isinstance(value, bool))
_parse_tokens = _checked(
    "'auto' or a whole number that is not negative",
    lambda value: value == "auto" or (type(value) is int and value >= 0),
    lambda value: None if value == "auto" else value,
)
_parse_remote_admission = _checked(
    "'all' or 'reuse(n)' with n from 1 to 16", lambda value: value == "all" or re.fullmatch(_REUSE, str(value))
)
_parse_remote = _checked(
    f"an address that begins with {', '.join(f'{scheme}://' for scheme in REMOTES[:-1])} or {REMOTES[-1]}://",
    lambda value: isinstance(value, str) and re.fullmatch(rf"({'|'.join(REMOTES)})://[^/\s]+(/\S*)?", value),
)
_parse_store_policy = _one_of(STORE_POLICIES, ", or a class of your own as 'module:Class'", _is_class_name)
_parse_eviction = _one_of(EVICTIONS, ", or a class of your own as 'module:Class'", _is_class_name)
_parse_admission = _checked("'all', 'learned', 'reuse(n)' with n from 1 to 16, or a 'module:Class'", _is_admission)


def _setting(default: Any, parse: Callable[[str, Any], Any], *, of_tier: bool = False) -> Any:
    """Return a field of ``Config``. ``parse``: reads the user's value of a key, and raises
    ConfigError. ``of_tier``: kvdisk as a tier of vLLM's own connector has it, too."""
    return field(default=default, metadata={"parse": parse, "of_tier": of_tier})


@dataclass(frozen=True, slots=True)
class Config:
    """Everything a user can set. Sizes are bytes, times are seconds.

    ``docs/CONFIGURATION.md`` is made from the text under each field: Markdown; then, where the
    default is not the field's own, what it is; then examples, each a value as JSON.
    """

    store_dirs: tuple[Path, ...] = _setting((), _parse_dirs, of_tier=True)
    """The directory of the NVMe tier, or a list with one directory on each drive. Blocks are spread
    over the drives. The first directory also has the indexes, and must stay the first. Paths are
    absolute. A missing directory is made, but its parent must exist; a symbolic link is refused. In
    a directory that others may write, such as a volume in a container, the store is in a
    subdirectory of the engine's user, `kvdisk-<user id>`. Engines of a user that name the same
    directories share what they store.

    Default: none: CPU tier only
    Example: "/nvme/kv"
    Example: ["/nvme0/kv", "/nvme1/kv"]
    """
    nvme_bytes: int | None = _setting(None, parse_bytes, of_tier=True)
    """The most bytes that this engine may keep on all drives together, over all ranks and with the
    index. When it is reached, old blocks are evicted for new ones. Engines that share directories
    have a cap each, and together never more than the sum; a data-parallel rank is an engine. An
    engine that starts with a smaller cap than before first cuts what is there to it. Where the
    drives have less room than the cap, the engine uses the room that there is, and more when room
    comes.

    Default: required with `store_dirs`
    Example: "500GiB"
    """
    cpu_bytes: int = _setting(4 << 30, parse_bytes)
    """Host memory of the CPU tier over all ranks of an engine; each data-parallel rank takes as
    much again. With a GPU it is pinned after the start, near that GPU where the machine says which
    memory is. Without a GPU it is taken as it is first used. Blocks are stored here first and
    loaded from here fastest; blocks on NVMe are written from here. 0: no CPU tier, and blocks go
    straight to the drive.

    Example: "64GiB"
    """
    staging_bytes: int | None = _setting(None, parse_bytes, of_tier=True)
    """Host memory of each worker for blocks on their way between GPU and drive that have no slot in
    the CPU tier. It is not part of a tier. It holds at least 8 blocks of each size, however small
    the value.

    Default: 128 MiB
    Example: "256MiB"
    """
    gpu_staging_bytes: int | None = _setting(None, parse_bytes)
    """GPU memory of each worker for blocks that go straight between drive and GPU (see `device`);
    checksums take another 16 MiB. 0: no block goes that way.

    Default: 64 MiB
    Example: 0
    """
    store_policy: str = _setting("on_compute", _parse_store_policy)
    """When blocks are stored. `"on_compute"`: each full block in the step that computes it.
    `"on_preemption"`: only what a preemption would lose, generated tokens too. `"spillover"`:
    shortly before the GPU's cache drops them. Or a class of your own, `"module:Class"`. With vLLM's
    prefix caching off `"spillover"` is refused, and for models with sliding windows
    `"on_preemption"`, which models with recurrent state never have. [Store
    policies](SCHEDULING.md#store-policies) has pictures of each.

    Example: "spillover"
    """
    store_decode: bool = _setting(False, _parse_flag)
    """Also store blocks of generated tokens. Pays where answers come back as the next prompt's
    beginning, as in chats.

    Example: true
    """
    cpu_admission: str = _setting("all", _parse_admission)
    """Which blocks may enter the CPU tier. `"all"`; `"reuse(n)"`: those that n distinct requests
    have wanted, n up to 16; `"learned"`; or a class of your own, `"module:Class"`. What each does:
    [admission](SCHEDULING.md#admission).

    Example: "reuse(2)"
    """
    nvme_admission: str = _setting("learned", _parse_admission, of_tier=True)
    """Which blocks may enter the NVMe tier, with the same choices. `"learned"`: everything while
    more than an eighth of it is free, then what is likelier to be asked for than what would leave
    for it; once nobody new has come for long, everything again. Memory still serves what NVMe
    refuses, while it is there.

    Example: "reuse(2)"
    """
    nvme_write_bytes_per_day: int | None = _setting(None, parse_bytes, of_tier=True)
    """The most that is written to NVMe in any 24 hours, over all ranks, for the drive's endurance;
    at once at most an hour's share. When it is spent, reads and hits in memory go on ([the
    budget](SCHEDULING.md#admission)).

    Default: none
    Example: "2TB"
    """
    eviction: str = _setting("learned", _parse_eviction, of_tier=True)
    """Which blocks a full tier evicts. `"learned"`: those that are expected to bring the fewest
    hits for the time that they are kept, learnt from how often and how soon similar blocks were
    asked for again. `"lru"`: those used longest ago. Or a class of your own, `"module:Class"`: see
    [eviction](SCHEDULING.md#eviction). With each of them the tail of a chain of blocks is evicted
    before its head.

    Example: "lru"
    """
    pin_share: float = _setting(0.25, _parse_share, of_tier=True)
    """How much of each tier [KV hints](OPERATING.md#kv-hints) may pin, as a share of its blocks, at
    most 0.5. Blocks pinned beyond it are evicted after all that have no hint. 0: nothing is pinned.

    Example: 0.1
    """
    salt_share: float | None = _setting(None, _parse_salt_share)
    """The most that blocks of one `cache_salt` may take, as a share of each tier, and in it of each
    size of blocks: above 0, and 1 at most. A tenant that has its share makes room for new blocks by
    evicting its own old ones, also while a tier has free room. Requests without a salt have no
    limit. [Tenants](OPERATING.md#tenants) says what this does not cover.

    Default: none
    Example: 0.1
    """
    device: str = _setting("auto", _one_of(DEVICES), of_tier=True)
    """How bytes are moved to and from the drive. `"posix"`: with nothing but the kernel. `"auto"`:
    the same, after a trial with a small file at the start; the log warns where the drive cannot be
    used at its best. With a GPU and GPUDirect Storage (kvdisk's extra `gds`) the trial also finds
    which sizes of blocks are faster straight between drive and GPU. `"gds"`: all blocks that can go
    straight do, or the engine does not start.

    Example: "posix"
    """
    lookup_wait_s: float = _setting(2.0, _parse_seconds, of_tier=True)
    """The longest time that a request waits for a block that is being stored or read, for another
    request's load, or for what other engines of the store have. Other requests go on meanwhile.
    After that the request takes what is there.

    Example: 0.5
    """
    io_deadline_s: float = _setting(30.0, _parse_seconds, of_tier=True)
    """A transfer that has not started by then, or takes longer on the drive, fails: a load is
    recomputed, a store is not made. A drive that does not answer for so long is left alone for a
    while.

    Example: 5
    """
    index_commit_s: float = _setting(0.05, _parse_seconds, of_tier=True)
    """The longest time that a stored block stays out of the index. A process that is killed loses
    at most the blocks of that time, and other engines find blocks that much later.

    Example: 0.5
    """
    remote: str | None = _setting(None, _parse_remote, of_tier=True)
    """A store in which hosts share blocks: a bucket, `"s3://bucket/prefix"`, `"gs://..."` or
    `"az://..."` (kvdisk's extra `s3`), or the master of a Mooncake Store, `"mooncake://host:port"`
    (extra `mooncake`). Behind memory and drive: blocks are sent there from memory, without a CPU
    tier from the drive, and found there by every engine of the same model. It may be down, at the
    start too. Nothing is deleted there by kvdisk: give a bucket a lifecycle rule.

    Default: none
    Example: "s3://my-bucket/kv"
    Example: "mooncake://10.0.0.1:50051"
    """
    remote_options: tuple[tuple[str, str], ...] = _setting((), _parse_options, of_tier=True)
    """Settings of `remote`, all as text. Of a bucket as
    [obstore](https://developmentseed.org/obstore/) names them, those of its HTTP client
    (`allow_http`, `timeout`, `proxy_url` ...) included; what is not said is taken from the
    environment, as the clients of these stores do. Of
    Mooncake as its `setup` names them: `protocol` (`"tcp"`, or `"rdma"`), `rdma_devices` (all),
    `metadata_server` (`"P2PHANDSHAKE"`), `local_hostname` (the address that the master sees),
    `tenant_id`, and `global_segment_size`, bytes that each process of the engine adds to the store
    (0).

    Default: `{}`
    Example: {"aws_endpoint": "http://minio:9000", "aws_region": "us-east-1"}
    Example: {"protocol": "rdma", "rdma_devices": "mlx5_0"}
    """
    remote_admission: str = _setting("reuse(2)", _parse_remote_admission, of_tier=True)
    """Which blocks are sent to `remote`: `"all"`, or `"reuse(n)"`: those that n distinct requests
    have wanted here.

    Example: "all"
    """
    remote_read_only: bool = _setting(False, _parse_flag, of_tier=True)
    """Load from `remote`, and send nothing there.

    Example: true
    """
    remote_write_bytes_per_s: int = _setting(0, parse_bytes, of_tier=True)
    """The most that is sent to `remote`, over all ranks, as a mean over a minute. 0: as much as the
    link takes. What waits for it may be evicted meanwhile, and is not sent then.

    Example: "100MB"
    """
    remote_deadline_s: float = _setting(3.0, _parse_seconds, of_tier=True)
    """The longest time that `remote` may take for a batch of blocks; what has not come by then is
    computed. A store that fails is left alone, for a second at first and a minute at most.

    Example: 1.5
    """
    remote_key_file: Path | None = _setting(None, _parse_file, of_tier=True)  # noqa: RUF009 - a field
    """A file with a secret of 32 bytes or more, the same on all hosts: blocks in `remote` are then
    sealed with it, and one that was sealed without it is not used.

    Default: none: all who can write the bucket are trusted
    Example: "/etc/kvdisk/key"
    """
    remote_codec: str | None = _setting(None, _one_of(CODECS), of_tier=True)
    """How blocks are coded before they are sent to `remote`, without loss. `"zstd-planes"`: each
    byte of an element apart, with zstd; needs kvdisk's extra `codec`. It pays where the link is
    slower than decoding ([when](REMOTE.md#fewer-bytes)). What hardly shrinks is sent as it is. An
    engine without this setting does not see coded blocks; one with it loads both.

    Default: none: blocks are sent as they are
    Example: "zstd-planes"
    """
    max_age_s: float | None = _setting(None, _parse_age, of_tier=True)
    """Blocks that were first stored longer ago than this, in any tier of any engine, are not
    served, and are dropped from memory and drive, however often they were used since. A block that
    is computed again is stored again. Blocks of other engines of the store count as well. This
    setting is refused with `remote`, which does not say how old a block is.
    [Security](SECURITY.md#an-age-limit) says what it does not cover.

    Default: none
    Example: 604800
    """
    unit_tokens: int | str = _setting(AUTO, parse_unit)
    """Tokens of a unit: several of vLLM's blocks that are stored, found and loaded as one. A hit
    ends with a unit, and so loses half of one; it costs the scheduler a fraction, and so do index
    and memory. `"auto"`: vLLM's blocks, unless a prompt of `max_model_len` has more than some 8,192
    of them in all KV-cache groups: then as many together as that needs, of at most 128 tokens and
    16 MiB on a rank, and no more than leave each tier room for 400. `"off"`: vLLM's blocks. A
    number: 16 MiB at most. [Units](MODELS.md#units) says what comes of it for windows, drafters,
    recurrent states and store policies of your own. Another unit is another namespace: what is
    stored is not found under it.

    Example: "off"
    Example: 64
    """
    min_load_tokens: int | None = _setting(None, _parse_tokens)
    """Hits of fewer tokens are computed instead of loaded. `"auto"`: hits of fewer than four blocks
    that would be computed sooner than the quickest recent load took; one in 16 of them is loaded,
    to learn. 0: every hit is loaded.

    Default: `"auto"`: learnt
    Example: 512
    """
    prefetch: bool = _setting(True, _parse_flag)
    """While a request waits in the engine's queue, read its blocks from NVMe into memory
    ([prefetch](SCHEDULING.md#prefetch)).

    Example: false
    """
    on_reset: str = _setting("epoch", _one_of(ON_RESET), of_tier=True)
    """What a `reset_cache` of vLLM means. It comes after weights were updated in memory, with each
    [sleep](RESETS.md#sleep), and for lesser reasons. `"epoch"`: this engine serves nothing again
    that was stored before. `"keep"`: weights never change in memory here, so everything stays.

    Example: "keep"
    """
    log_requests: bool = _setting(False, _parse_flag, of_tier=True)
    """Log for each request how its prompt divides between GPU, memory, NVMe and what was computed,
    what its load took and saved, and why it was not more. Otherwise this is logged at the level
    DEBUG.

    Example: true
    """
    trace_file: Path | None = _setting(None, _parse_file)  # noqa: RUF009 - a field
    """A file that records which requests came, for [`kvdisk
    replay`](REPLAY.md#a-trace-of-your-own): when, how long they and their answers were, and which
    begin alike. It has no text and no token: blocks are short hashes with a random key, which each
    file has of its own and which is kept nowhere. A file that reaches 64 MiB, or was left by the
    run before, is renamed to end in `.1`: never more than two are kept. The directory must exist.
    Each engine needs a file of its own; data-parallel ranks from 1 on add their number (`-dp1`) to
    the name.

    Default: none
    Example: "/var/tmp/kvdisk-trace.jsonl"
    """
    segment_bytes: int = _setting(1 << 30, parse_bytes, of_tier=True)
    """The bytes that are taken of a drive at once: the length of one rank's segment file. Small
    stores take shorter files, so that there are at least four.

    Example: "256MiB"
    """

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Config:
        """Build a Config from a user's values. Raises ConfigError, which names the key, and for an
        unknown key the known one that is most like it."""
        for key in values:
            if key not in PARSERS:
                raise ConfigError(f"kvdisk does not know the setting {key!r}{nearest(key, PARSERS)}.")
        config = cls(**{key: PARSERS[key](key, value) for key, value in values.items() if value is not None})
        config._check_together()
        return config

    def _check_together(self) -> None:
        if self.store_dirs and self.nvme_bytes is None:
            raise ConfigError(
                "store_dirs needs nvme_bytes, the most that this engine may keep there, such as '500GiB'."
            )
        if self.nvme_bytes is not None and not self.store_dirs:
            raise ConfigError("nvme_bytes needs store_dirs, the directory on the drive where blocks shall be kept.")
        if self.nvme_write_bytes_per_day is not None and not self.store_dirs:
            raise ConfigError("nvme_write_bytes_per_day needs store_dirs: without it nothing is written to a drive.")
        if self.max_age_s is not None and self.remote is not None:
            raise ConfigError(
                "max_age_s cannot be used with remote, which does not say how old a block is; give the bucket a "
                "lifecycle rule, and leave out one of the two."
            )
        if self.remote is None:
            # Those that say something only once they are set; the others have a default that does.
            for name in (each.name for each in fields(self) if each.name.startswith("remote_") and not each.default):
                if getattr(self, name):
                    raise ConfigError(f"{name} needs remote, the store that hosts share, such as 's3://bucket/prefix'.")
        elif self.remote_deadline_s == 0:
            raise ConfigError("remote_deadline_s must be more than 0.")
        if not self.store_dirs and self.cpu_bytes == 0:
            raise ConfigError("With cpu_bytes 0 and no store_dirs there is no tier to keep anything in.")


PARSERS: Mapping[str, Callable[[str, Any], Any]] = {each.name: each.metadata["parse"] for each in fields(Config)}
TIER_KEYS = tuple(each.name for each in fields(Config) if each.metadata["of_tier"])
"""The settings that kvdisk as a tier of vLLM's own connector has, too."""


def nearest(name: str, known: Iterable[str], beginning: str = "") -> str:
    """Return the end of a sentence about a name that is not known: the known one that is most like
    it; empty where none is. ``beginning``: all begin so, and are no more alike for it."""
    folded = {each.removeprefix(beginning).lower(): each for each in known}
    near = difflib.get_close_matches(str(name).removeprefix(beginning).lower(), folded, n=1, cutoff=_NEAR_MISS)
    return f"; the nearest it knows is {folded[near[0]]!r}" if near else ""


def find_own(key: str, text: str, protocol: type) -> type:
    """Return the class that a setting names as ``module:Class``. It must have all members of
    ``protocol``. Raises ConfigError, so that a slip is found at the start."""
    module, _, name = text.partition(":")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{key} names {text!r}, whose module cannot be imported: {said}.") from error
    if not isinstance(found, type):
        raise ConfigError(f"{key} names {text!r}, but the module has no class of that name.")
    wanted = [name for name in (*vars(protocol), *inspect.get_annotations(protocol)) if not name.startswith("_")]
    missing = [name for name in wanted if not hasattr(found, name)]
    if missing:
        raise ConfigError(f"{key} names {text!r}, which does not have {', '.join(map(repr, missing))}.")
    return found


def make_own(key: str, text: str, protocol: type, *arguments: Any) -> Any:
    """Return a new object of the class that ``find_own`` finds, built with these arguments. Raises
    ConfigError."""
    found = find_own(key, text, protocol)
    try:
        return found(*arguments)
    except Exception as error:  # whatever the user's class raises
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{key} names {text!r}, which cannot be built: {said}.") from error
