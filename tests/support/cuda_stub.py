# SPDX-License-Identifier: Apache-2.0
"""A ``libcuda.so.1`` for machines without a GPU, so that kvikio runs its way through host memory in
tests.

kvikio takes all memory for host memory where ``cuPointerGetAttributes`` answers *not initialised*.
That is what every function of this library answers, but ``cuDriverGetVersion``. Written byte by
byte, since a compiler is not there everywhere: one segment with code, symbols and a hash table.
"""

from __future__ import annotations

import platform
import struct
from pathlib import Path

_NAMES = """
MemHostAlloc MemFreeHost MemHostRegister MemHostUnregister MemcpyHtoDAsync MemcpyDtoHAsync
MemcpyAsync MemcpyBatchAsync PointerGetAttribute PointerGetAttributes CtxCreate CtxDestroy
CtxPushCurrent CtxPopCurrent CtxGetCurrent CtxGetDevice MemGetAddressRange GetErrorName
GetErrorString DeviceGet DeviceGetCount DeviceGetAttribute DevicePrimaryCtxRetain
DevicePrimaryCtxRelease StreamSynchronize StreamCreate StreamDestroy EventSynchronize
EventCreate EventDestroy EventRecord EventQuery LaunchHostFunc Init
"""
_VERSION = "cuDriverGetVersion"
_REFUSING = [f"cu{name}{version}" for name in _NAMES.split() for version in ("", "_v2", "_v3", "_v4")]

_MACHINE = 62  # x86-64
_REFUSE = "b803000000c3"  # mov eax, 3; ret
_SAY_VERSION = "c707c832000031c0c3"  # mov dword [rdi], 13000; xor eax, eax; ret
_EHDR = struct.Struct("<16sHHIQQQIHHHHHH")
_PHDR = struct.Struct("<IIQQQQQQ")
_SYM = struct.Struct("<IBBHQQ")
_DYN = struct.Struct("<qQ")


def write_stub(folder: Path) -> Path:
    """Write the library into a folder, for LD_LIBRARY_PATH of a child process, and return its path.

    For x86-64 only.
    """
    assert platform.machine() == "x86_64", platform.machine()
    code = bytes.fromhex(_REFUSE).ljust(32, b"\0") + bytes.fromhex(_SAY_VERSION).ljust(32, b"\0")
    names = [*_REFUSING, _VERSION]
    strings, places = b"\0", []
    for name in ("libcuda.so.1", *names):
        places.append(len(strings))
        strings += name.encode() + b"\0"
    code_at = 0x1000
    symbols = _SYM.pack(0, 0, 0, 0, 0, 0)
    for name, place in zip(names, places[1:], strict=True):
        symbols += _SYM.pack(place, 0x12, 0, 1, code_at + (32 if name == _VERSION else 0), 32)
    count = len(names) + 1
    # One bucket: a chain of all symbols. 0 ends it.
    table = struct.pack(f"<III{count}I", 1, count, 1, *[0, *range(2, count), 0])
    symbols_at = code_at + len(code)
    strings_at = symbols_at + len(symbols)
    table_at = -(-(strings_at + len(strings)) // 8) * 8
    dynamic_at = -(-(table_at + len(table)) // 8) * 8
    said = [(14, places[0]), (4, table_at), (5, strings_at), (6, symbols_at), (10, len(strings)), (11, 24), (0, 0)]
    dynamic = b"".join(_DYN.pack(*pair) for pair in said)
    end = dynamic_at + len(dynamic)
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    image = bytearray(end)
    image[: _EHDR.size] = _EHDR.pack(ident, 3, _MACHINE, 1, 0, 64, 0, 0, 64, 56, 3, 0, 0, 0)
    headers = [(1, 7, 0, end, 0x1000), (2, 6, dynamic_at, len(dynamic), 8), (0x6474E551, 6, 0, 0, 16)]
    for at, (kind, flags, place, size, alignment) in enumerate(headers):
        _PHDR.pack_into(image, 64 + at * 56, kind, flags, place, place, place, size, size, alignment)
    for place, data in ((code_at, code), (symbols_at, symbols), (strings_at, strings), (table_at, table)):
        image[place : place + len(data)] = data
    image[dynamic_at:] = dynamic
    path = folder / "libcuda.so.1"
    path.write_bytes(image)
    return path
