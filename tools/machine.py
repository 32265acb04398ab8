# SPDX-License-Identifier: Apache-2.0
"""What figures were measured on: this machine, and the drive of a directory."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvdisk import __version__
from kvdisk.cli.output import size


@dataclass(frozen=True)
class Machine:
    """This machine, and the drive of a directory. None: not known."""

    processor: str | None
    cores: int
    memory_bytes: int
    file_system: str | None
    drive: str | None
    kernel: str
    python: str
    kvdisk: str
    load: float

    @classmethod
    def here(cls, directory: Path) -> Machine:
        """Describe this machine and the drive that ``directory`` is on."""
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return cls(
            processor=next(iter(names), None),
            cores=len(os.sched_getaffinity(0)),
            memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            file_system=_file_system(directory),
            drive=_drive(os.stat(directory).st_dev),
            kernel=platform.release(),
            python=platform.python_version(),
            kvdisk=__version__,
            load=os.getloadavg()[0],
        )

    @property
    def sentence(self) -> str:
        """The description in one line."""
        return f"{self.without_load}, load {self.load:.1f}"

    @property
    def without_load(self) -> str:
        """What stays as it is while something is measured."""
        return (
            f"{self.cores} cores ({self.processor or 'unknown'}), {size(self.memory_bytes)} memory,"
            f" {self.file_system or 'unknown file system'} on {self.drive or 'an unknown drive'},"
            f" Linux {self.kernel}, Python {self.python}"
        )


def _file_system(directory: Path) -> str | None:
    """Return a file system's type: that of the longest mount point above a directory."""
    types: dict[Path, str] = {}
    with suppress(OSError, IndexError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, behind = line.partition(" - ")
            types[Path(before.split()[4].replace("\\040", " "))] = behind.split()[0]
    resolved = Path(os.path.realpath(directory))
    return next((types[mount] for mount in (resolved, *resolved.parents) if mount in types), None)


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
