# SPDX-License-Identifier: Apache-2.0
"""Which kind of file system a store's directory is on, and what that means for the store.

A store needs three things of it: a flock that every process on any machine sees, renames and
``fsync`` that hold after a crash, and O_DIRECT, or at least writes that cost no second copy.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from kvdisk.errors import ConfigError

MOUNTINFO_PATH = Path("/proc/self/mountinfo")
_HOSTS_PATH = Path("/etc/hosts")
_ESCAPED = re.compile(r"\\([0-7]{3})")

_NETWORK = (
    "two machines that use it at once may not see each other's locks, and may take one store over from each other"
)
_USER_SPACE = "what holds after a crash, and whether others see its locks, is up to a program that kvdisk does not know"
_OBJECTS = "it keeps objects: it cannot write in place, and does not lock"

REFUSED = {
    "cifs": _NETWORK,
    "smb3": _NETWORK,
    "smbfs": _NETWORK,
    "afs": _NETWORK,
    "coda": _NETWORK,
    "9p": "it has no locks that other machines see, and is no block device of this one",
    "fuse.sshfs": "it does not lock, and cannot write in place after its connection was lost",
    "fuse.rclone": _OBJECTS,
    "fuse.s3fs": _OBJECTS,
    "fuse.gcsfuse": _OBJECTS,
    "fuse.goofys": _OBJECTS,
    "fuse.geesefs": _OBJECTS,
    "fuse.mount-s3": _OBJECTS,
    "fuse.blobfuse": _OBJECTS,
    "fuse.blobfuse2": _OBJECTS,
}
"""The kinds on which blocks would be lost, or stores taken from each other, and why."""

WARNED = {
    "nfs": _NETWORK,
    "nfs4": _NETWORK,
    "lustre": _NETWORK,
    "ceph": _NETWORK,
    "beegfs": _NETWORK,
    "gpfs": _NETWORK,
    "pvfs2": _NETWORK,
    "glusterfs": _NETWORK,
    "ocfs2": _NETWORK,
    "gfs2": _NETWORK,
    "fuse.glusterfs": _NETWORK,
    "fuse.ceph": _NETWORK,
    "fuse.ceph-fuse": _NETWORK,
    "fuse.juicefs": _NETWORK,
    "tmpfs": "it is memory: what is stored there takes memory, and is gone after a reboot",
    "ramfs": "it is memory without a bound: what is stored there takes memory, and is gone after a reboot",
    "overlay": "it is a container's own file system: what is stored there is gone with the container",
}
"""The kinds on which a store works, and what a user must know about each."""


LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs"})
"""The kinds that one machine has mounted at a time, so that it sees all locks there."""
NFS_SERVER_PATH = Path("/proc/net/rpc/nfsd")
"""It is there where this machine may serve its file systems to others, whose locks it would not
see."""

LOCAL_LOCKS = frozenset({"nolock", "local_lock=all", "local_lock=flock", "localflock", "noflock"})
"""Options of NFS and Lustre mounts with which no machine sees another's flock."""


class Mount(NamedTuple):
    """The place where a file system is mounted, its kind (``nfs4``, ``fuse.sshfs``), its options,
    and its device as two numbers (``8:1``)."""

    point: str
    kind: str
    options: frozenset[str] = frozenset()
    device: str = ""


def parse_mounts(text: str) -> list[Mount]:
    """Return the mounts that a ``mountinfo`` file lists, in its order, so the topmost last; lines
    that do not parse are left out."""
    found = []
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        fields, more = left.split(" "), right.split(" ")
        if separator and len(fields) >= 6 and more[0]:
            options = frozenset(",".join([fields[5], *more[2:]]).split(","))
            point = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), fields[4])
            found.append(Mount(point, more[0], options, fields[2]))
    return found


def mount_of(path: str, mounts: list[Mount]) -> Mount | None:
    """Return the mount that a path without symlinks is on; None where no mount holds it."""
    found = None
    for mount in mounts:
        holds = path == mount.point or path.startswith(f"{mount.point.rstrip('/')}/")
        if holds and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def kind_of(path: Path) -> Mount | None:
    """Return the mount that a directory is on, or will be on when it is made; None where the system
    does not say."""
    try:
        text = MOUNTINFO_PATH.read_text("utf-8", "surrogateescape")
    except OSError:
        return None
    return mount_of(os.path.realpath(path), parse_mounts(text))


def is_on_root(path: Path) -> bool:
    """Whether a directory is on the root file system, or would be if it were made; False where the
    system does not say.

    In a container that is the host's: a volume whose drive the host has not mounted is a directory
    there. So is what lies where the container's own ``/etc/hosts`` does.
    """
    mount, hosts = kind_of(path), kind_of(_HOSTS_PATH)
    if mount is None or hosts is None:
        return False
    return mount.point == "/" or (hosts.point == str(_HOSTS_PATH) and hosts.device == mount.device)


def sees_all_locks(path: Path) -> bool:
    """Whether a directory is on a drive that no other machine can use at the same time; False where
    the system does not say."""
    mount = kind_of(path)
    return mount is not None and mount.kind in LOCAL and not NFS_SERVER_PATH.exists()


def check_mount(path: Path) -> str | None:
    """Return a sentence that a user must know about a directory's file system, or None. Raises
    ConfigError where it cannot hold a store."""
    mount = kind_of(path)
    if mount is None:
        return None
    where = f"store_dirs: {path} is on {mount.kind}"
    local = sorted(LOCAL_LOCKS & mount.options)
    why = f"with the option {local[0]} its locks are each machine's own" if local else REFUSED.get(mount.kind)
    if why:
        raise ConfigError(f"{where}, which cannot hold a store: {why}; name a directory on a local drive")
    if why := WARNED.get(mount.kind):
        return f"{where}: {why}."
    if mount.kind == "fuse" or mount.kind.startswith("fuse."):
        return f"{where}: {_USER_SPACE}."
    return None
