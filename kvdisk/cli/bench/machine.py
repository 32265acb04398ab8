# SPDX-License-Identifier: Apache-2.0
"""What a run was measured on."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvdisk import __version__
from kvdisk.cli.output import size


@dataclass(frozen=True)
class Machine:
    """This machine, and the drive of a directory. None: not known."""

    processor: str | None
    cores: int
    memory_bytes: int | None
    file_system: str | None
    drive: str | None
    kernel: str = field(default_factory=platform.release)
    python: str = field(default_factory=platform.python_version)
    kvdisk: str = __version__
    load: float = field(default_factory=lambda: os.getloadavg()[0])

    @property
    def sentence(self) -> str:
        """The description in one line."""
        return (
            f"{self.cores} cores ({self.processor or 'unknown'}), {size(self.memory_bytes)} memory,"
            f" {self.file_system or 'unknown file system'} on {self.drive or 'an unknown drive'},"
            f" Linux {self.kernel}, Python {self.python}, load {self.load:.1f}"
        )


def describe(directory: Path) -> Machine:
    """Describe this machine and the drive that ``directory`` is on."""
    memory = _field("/proc/meminfo", "MemTotal")
    return Machine(
        processor=_field("/proc/cpuinfo", "model name") or platform.processor() or None,
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=int(memory.split()[0]) * 1024 if memory else None,
        file_system=_file_system(directory),
        drive=_drive(os.stat(directory).st_dev),
    )


def _field(path: str, wanted: str) -> str | None:
    """Return the value of the first line ``wanted: value`` of a file of the kernel."""
    with suppress(OSError):
        for line in Path(path).read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == wanted:
                return value.strip()
    return None


def _file_system(directory: Path) -> str | None:
    """Return a file system's type: that of the longest mount point above a directory."""
    resolved = Path(os.path.realpath(directory))
    found, longest = None, -1
    with suppress(OSError, IndexError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, behind = line.partition(" - ")
            mount = Path(before.split()[4].replace("\\040", " "))
            if resolved.is_relative_to(mount) and len(mount.parts) >= longest:
                found, longest = behind.split()[0], len(mount.parts)
    return found


def _drive(number: int) -> str | None:
    """Return the model, or the name, of the drive with a device number, if it is one."""
    link = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not link.exists():
        return None
    path = link.resolve()
    if not (path / "queue").exists():  # a partition; the drive is the directory above
        path = path.parent
    with suppress(OSError):
        return (path / "device" / "model").read_text().strip() or path.name
    return path.name
