# SPDX-License-Identifier: Apache-2.0
"""What a run was measured on, as plain values: figures mean little without it."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvdisk import __version__
from kvdisk.cli.bench import fio
from kvdisk.cli.output import size

_SECTOR_BYTES = 512


def describe(directory: Path) -> dict[str, Any]:
    """Describe this machine and the drive that ``directory`` is on; what cannot be found out is None."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": _memory_bytes(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "kvdisk": __version__,
        "fio": fio.version(),
        "file_system": _file_system(directory),
        "drive": _drive(os.stat(directory).st_dev),
        "load": list(os.getloadavg()),
    }


def sentence(machine: dict[str, Any]) -> str:
    """Return the description in one line for people."""
    drive = machine["drive"] or {}
    parts = [
        f"{machine['cores']} cores ({machine['processor'] or 'unknown'})",
        f"{size(machine['memory_bytes'])} memory",
        f"{machine['file_system'] or 'unknown file system'} on"
        f" {drive.get('model') or drive.get('name') or 'an unknown drive'}",
        f"Linux {machine['kernel']}",
        f"Python {machine['python']}",
        machine["fio"] or "no fio",
        f"load {machine['load'][0]:.1f}",
    ]
    return ", ".join(parts)


def _processor() -> str | None:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or None


def _memory_bytes() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    return None


def _file_system(directory: Path) -> str | None:
    """Return the type of the file system that a directory is on: of the longest mount point above it."""
    resolved = Path(os.path.realpath(directory))
    found, longest = None, -1
    with suppress(OSError, IndexError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, behind = line.partition(" - ")
            mount = Path(before.split()[4].replace("\\040", " "))
            if resolved.is_relative_to(mount) and len(mount.parts) >= longest:
                found, longest = behind.split()[0], len(mount.parts)
    return found


def _drive(number: int) -> dict[str, Any] | None:
    """Return name, model, size and scheduler of the drive behind a device number; None where it is no drive."""
    link = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not link.exists():
        return None
    path = link.resolve()
    if not (path / "queue").exists():  # a part of a drive: the drive is the directory above
        path = path.parent

    def read(name: str) -> str | None:
        with suppress(OSError):
            return (path / name).read_text().strip() or None
        return None

    sectors, rotational = read("size"), read("queue/rotational")
    return {
        "name": path.name,
        "model": read("device/model"),
        "bytes": int(sectors) * _SECTOR_BYTES if sectors and sectors.isdigit() else None,
        "rotational": None if rotational is None else rotational == "1",
        "scheduler": read("queue/scheduler"),
        "longest_request_kib": read("queue/max_sectors_kb"),
    }
