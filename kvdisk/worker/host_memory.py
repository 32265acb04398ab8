# SPDX-License-Identifier: Apache-2.0
"""How much memory this process may take, and whether all ranks of this host fit into it.

A process is killed at the least limit of all control groups around it, of version 1 or 2, not only
at that of its own group.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from kvdisk.errors import ConfigError

MACHINE = "this machine"
_OCTAL = re.compile(r"\\([0-7]{3})")


class HostMemory(NamedTuple):
    """A limit of memory. ``where``: what sets the limit, in words."""

    limit_bytes: int
    where: str = MACHINE


class Deployment(NamedTuple):
    """How the workers are placed. ``ranks``: of one engine. ``engines``: engines on this host with
    equal settings, which are data-parallel ranks. ``hosts``: hosts over which one engine's ranks
    are spread."""

    ranks: int = 1
    engines: int = 1
    hosts: int = 1

    @property
    def ranks_here(self) -> int:
        """Ranks of all engines on this host."""
        return -(-self.ranks // self.hosts) * self.engines


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Return the machine's memory, or the least limit of a control group around this process, if
    that is less. ``root``: the directory that has ``/proc`` and ``/sys``."""
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([HostMemory(machine_bytes), *_limits(root)], key=lambda each: each.limit_bytes)


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that can be taken now, of the machine and of each control group around this
    process; 0 where the system does not say. ``root``: as in ``host_memory``."""
    try:
        found = dict(line.split(":") for line in (root / "proc/meminfo").read_text().splitlines())
        free = [int(found["MemAvailable"].split()[0]) << 10]
    except (OSError, KeyError, ValueError):
        return 0
    return min(free + [left for group in control_groups(root) if (left := _left_in(group)) is not None])


def check_host_memory(rank_bytes: int, deployment: Deployment, memory: HostMemory | None = None) -> None:
    """Raise ConfigError where the ranks of this host do not fit into its memory. ``rank_bytes``: of
    one rank. ``memory``: the host's; None looks it up."""
    limit_bytes, where = memory or host_memory()
    needed_bytes = rank_bytes * deployment.ranks_here
    if needed_bytes <= limit_bytes:
        return
    engines = f" of {deployment.engines} engines" if deployment.engines > 1 else ""
    ranks = f"{deployment.ranks_here} ranks{engines} need" if deployment.ranks_here > 1 else "A rank needs"
    raise ConfigError(
        f"{ranks} {_gib(needed_bytes)} of host memory, and {where} has {_gib(limit_bytes)}; lower cpu_bytes."
    )


def _gib(count_bytes: int) -> str:
    return f"{count_bytes / (1 << 30):,.2f} GiB"


# -- control groups ------------------------------------------------------------------------------


class ControlGroup(NamedTuple):
    """A control group around this process. ``version``: 1 or 2. ``name``: its path below what is
    mounted."""

    path: Path
    version: int
    name: PurePosixPath


def control_groups(root: Path = Path("/")) -> Iterator[ControlGroup]:
    """Yield the groups that limit this process's memory, in each version from its own group up to
    the highest one that is mounted here."""
    try:
        own = (root / "proc/self/cgroup").read_text("utf-8", "surrogateescape")
        mounts = (root / "proc/self/mountinfo").read_text("utf-8", "surrogateescape")
    except OSError:
        return  # a kernel without them
    groups: dict[str, str] = {}
    for _, controllers, group in (line.split(":", 2) for line in own.splitlines() if line.count(":") > 1):
        if not controllers:
            groups["cgroup2"] = group
        elif "memory" in controllers.split(","):
            groups["cgroup"] = group
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = [*after.split(" "), "", "", ""][:3]
        if kind in groups and (kind == "cgroup2" or "memory" in options.split(",")):
            mounted, point = (_plain(field) for field in before.split(" ")[3:5])
            top, below, version = root / point.lstrip("/"), _below(mounted, groups[kind]), 2 if kind == "cgroup2" else 1
            # In version 1 a group may be independent of those above it.
            is_apart = version == 1 and _number(top / below / "memory.use_hierarchy") == 0
            for name in (below, *([] if is_apart else below.parents)):
                yield ControlGroup(top / name, version, name)


def _limits(root: Path) -> Iterator[HostMemory]:
    """Yield the limits of the groups around this process."""
    for group in control_groups(root):
        file = "memory.max" if group.version == 2 else "memory.limit_in_bytes"
        # In version 1 the group also names the least limit of all, of those above the mount too.
        for limit_bytes in (_number(group.path / file), _facts(group).get("hierarchical_memory_limit")):
            if limit_bytes is not None:
                yield HostMemory(limit_bytes, _named(group.name))


def _facts(group: ControlGroup) -> dict[str, int]:
    """Return the entries of a group's ``memory.stat``; none where there is no such file."""
    try:
        lines = (group.path / "memory.stat").read_text().splitlines()
        return {name: int(value) for name, value in (line.split(" ", 1) for line in lines)}
    except (OSError, ValueError):
        return {}


def _left_in(group: ControlGroup) -> int | None:
    """Return the bytes that a group may still take, those that caches of files could give back
    included; None where it has no limit."""
    limit, used, cache = (
        ("memory.max", "memory.current", "inactive_file")
        if group.version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    limit_bytes, used_bytes = _number(group.path / limit), _number(group.path / used)
    if limit_bytes is None or used_bytes is None:
        return None
    return limit_bytes - used_bytes + _facts(group).get(cache, 0)


def _below(mounted: str, group: str) -> PurePosixPath:
    """Return a group's path below a mount that begins at the group ``mounted``. A group that is not
    below it is in another namespace: then the mount is all that can be seen."""
    if ".." not in PurePosixPath(group).parts and PurePosixPath(group).is_relative_to(mounted):
        return PurePosixPath(group).relative_to(mounted)
    return PurePosixPath()


def _named(group: PurePosixPath) -> str:
    return f"this container (control group /{group})" if group.parts else "this container"


def _number(file: Path) -> int | None:
    """Return the number in a file; None where it says "max", or cannot be read."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _plain(field: str) -> str:
    """Return a path of mountinfo, in which spaces are written as octal digits."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), field)
