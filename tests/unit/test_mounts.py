# SPDX-License-Identifier: Apache-2.0
"""Which file systems a store may lie on, by what the system lists as mounted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_stores import run_here

from kvdisk import assembly
from kvdisk.assembly import check_settings, warn_of_file_systems
from kvdisk.device import mounts
from kvdisk.device.mounts import Mount, mount_of, parse_mounts
from kvdisk.errors import ConfigError

LISTED = """\
22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw,discard
31 22 0:30 / /net/nfs rw,relatime shared:9 - nfs4 server:/share rw,vers=4.2,local_lock=none
32 22 0:31 / /net/my\\040drive rw - cifs //server/share rw,vers=3.1.1
33 31 254:2 / /net/nfs/local rw master:2 propagate_from:1 - xfs /dev/vdb rw
34 22 0:40 / /net/nfs rw - tmpfs tmpfs rw
a line that says nothing
35 22 0:41 / short -
"""


def test_the_longest_and_last_mount_that_holds_a_path_is_its_own():
    found = parse_mounts(LISTED)
    assert [mount.kind for mount in found] == ["ext4", "nfs4", "cifs", "xfs", "tmpfs"]
    assert "local_lock=none" in found[1].options and "relatime" in found[1].options
    of = {path: mount_of(path, found).kind for path in ("/net/nfs/kv", "/net/nfs/local/kv", "/net/nfsx", "/net/nfs")}
    assert of == {"/net/nfs/kv": "tmpfs", "/net/nfs/local/kv": "xfs", "/net/nfsx": "ext4", "/net/nfs": "tmpfs"}
    assert mount_of("/net/my drive/kv", found).kind == "cifs"
    assert mount_of("/", [Mount("/net", "xfs")]) is None


@pytest.fixture
def on(tmp_path, monkeypatch):
    """Have the system say that ``tmp_path`` lies on a file system of a kind."""

    def say(kind: str, options: str = "rw") -> Path:
        text = f"1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:3 / {tmp_path.resolve()} rw - {kind} what {options}\n"
        (tmp_path / "mountinfo").write_text(text)
        monkeypatch.setattr(mounts, "MOUNTINFO_PATH", tmp_path / "mountinfo")
        monkeypatch.setattr(assembly, "_WARNED_OF", set())
        return tmp_path / "kv"

    return say


def settings(path: Path) -> dict[str, object]:
    return {"store_dirs": str(path), "nvme_bytes": "1GiB", "cpu_bytes": 0}


@pytest.mark.parametrize("kind", [*mounts.REFUSED, "nfs,nolock", "nfs4,local_lock=flock", "lustre,localflock"])
def test_what_cannot_hold_a_store_is_refused_by_name_before_the_weights_and_by_check(on, kind):
    kind, _, options = kind.partition(",")
    path = on(kind, f"rw,{options}" if options else "rw")
    with pytest.raises(ConfigError, match=f"{path} is on {kind}, which cannot hold a store: .*local drive"):
        check_settings(settings(path))
    (path.parent / "config.json").write_text(json.dumps(settings(path)))
    done = run_here("check", path.parent / "config.json")
    assert done.exit_code == 2 and f"is on {kind}, which cannot hold a store" in " ".join(done.stderr.split())


@pytest.mark.parametrize("kind", [*mounts.WARNED, "fuse.somebodys"])
def test_what_a_user_must_know_is_a_warning_once_and_a_line_of_check(on, kind, caplog):
    path = on(kind)
    for _ in range(2):
        warn_of_file_systems(check_settings(settings(path)))
    (said,) = [line for line in caplog.messages if "is on" in line]
    assert said.startswith(f"store_dirs: {path} is on {kind}: ")
    (path.parent / "config.json").write_text(json.dumps(settings(path)))
    found = json.loads(run_here("check", path.parent / "config.json", "--json").stdout)
    assert [line for line in found["problems"] if f"is on {kind}: " in line]


def test_local_drives_and_what_the_system_does_not_say_are_nobodys_business(on, tmp_path, monkeypatch, caplog):
    for kind in ("ext4", "xfs", "btrfs", "zfs", "f2fs"):
        warn_of_file_systems(check_settings(settings(on(kind))))
    monkeypatch.setattr(mounts, "MOUNTINFO_PATH", tmp_path / "none")
    warn_of_file_systems(check_settings(settings(tmp_path / "kv")))
    assert not [line for line in caplog.messages if "is on" in line]
