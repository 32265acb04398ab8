# SPDX-License-Identifier: Apache-2.0
"""Which NUMA node a GPU hangs on, and memory that comes from there: a copy across nodes is slower, and disturbs both.

A machine with one node, or one that does not say, is left alone.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from pathlib import Path

SYS = Path("/sys")
_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED = 1
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def pci_address(domain: int, bus: int, device: int) -> str:
    """Return the name that sysfs has for a GPU's PCI function."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def node_of(address: str, sys: Path = SYS) -> int | None:
    """Return the node of a PCI device; None where that is not known, or there is no other node with memory."""
    try:
        nodes = parse_list((sys / "devices/system/node/has_memory").read_text())
        node = int((sys / "bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node in nodes and len(nodes) > 1 else None


def parse_list(text: str) -> set[int]:
    """Return the numbers of a list as sysfs writes it, such as ``0-1,4``. Raises ValueError for anything else."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def prefer_node(start: int, byte_count: int, node: int) -> None:
    """Let memory that has not been touched come from a node while that has any, and from others then.

    ``start``: an address, as a mapping begins. Raises OSError where the kernel refuses.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    words = (ctypes.c_ulong * (node // _WORD_BITS + 1))()
    words[node // _WORD_BITS] = 1 << node % _WORD_BITS
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel looks at one bit fewer than it is told that there are.
    bits = ctypes.c_ulong(_WORD_BITS * len(words) + 1)
    arguments = (ctypes.c_void_p(start), ctypes.c_ulong(byte_count), ctypes.c_int(_PREFERRED), words, bits)
    if libc.syscall(ctypes.c_long(number), *arguments, ctypes.c_uint(0)) != 0:
        found = ctypes.get_errno()
        raise OSError(found, os.strerror(found))
