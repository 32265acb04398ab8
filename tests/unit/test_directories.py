# SPDX-License-Identifier: Apache-2.0
"""Stores in directories that others may use too, such as volumes in containers, and what another
user is told. Users need root, who can be any of them."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_stores import CAP, PLAIN, leave_home, run_here
from support.users import user

from kvdisk.device.drives import check_directories
from kvdisk.device.probe import probe
from kvdisk.device.store import Store
from kvdisk.errors import ConfigError

ME, OTHER, GROUP = 12345, 12346, 23456
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")


@pytest.fixture
def volume() -> Iterator[Path]:
    """A directory below which no other user is kept out."""
    around = Path(tempfile.mkdtemp())
    around.chmod(0o755)
    (around / "kv").mkdir()
    yield around / "kv"
    shutil.rmtree(around)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def as_kubelet(volume: Path) -> None:
    """Do what Kubernetes does to a volume each time it mounts one for a pod with an fsGroup."""
    for path in (volume, *volume.rglob("*")):
        os.chown(path, -1, GROUP)
        path.chmod(mode_of(path) | (0o2770 if path.is_dir() else 0o660))


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o2770, 0o775])
def test_a_directory_that_others_may_write_holds_one_of_our_own(volume, mode):
    volume.chmod(mode)
    (volume / "of another").touch()
    check_directories(volume)
    assert not list(volume.glob("kvdisk-*")), "looked at, and not made"
    inner = volume / f"kvdisk-{os.geteuid()}"
    assert probe(volume).directory == inner
    home_id = leave_home(volume, PLAIN, 1, last_use_s=5000)
    assert (inner / "homes" / home_id).is_dir()
    assert (mode_of(volume), mode_of(inner)) == (mode, 0o700)
    for named in (volume, inner):
        done = run_here("inspect", named, "--stores")
        assert done.exit_code == 0 and home_id[:8] in done.stdout
    volume.chmod(0o700)
    assert Store.open(volume).path == inner, "what was made there is found for good"


@as_root
@pytest.mark.parametrize("mode", [0o770, 0o2770])
def test_a_volume_of_kubernetes_with_a_group_serves_over_restarts(volume, mode):
    os.chown(volume, 0, GROUP)
    volume.chmod(mode)
    with user(ME, GROUP):
        home_id = leave_home(volume, PLAIN, 1, last_use_s=5000)
    as_kubelet(volume)
    inner = volume / f"kvdisk-{ME}"
    assert mode_of(inner) & 0o070 == 0o070
    with user(ME, GROUP):
        check_directories(volume)
        home = Store.open(volume).acquire_home(PLAIN.fingerprint, PLAIN.description, CAP)
        assert not home.fresh and home.index_is_sound() and not (inner / "homes" / home_id).exists()
        home.close(clean=True)
    assert mode_of(inner) == 0o700, "others are kept out again"


@pytest.mark.parametrize(("mode", "members", "refused"), [(0o770, 0, False), (0o770, 1, True), (0o702, 0, True)])
def test_a_store_that_another_user_could_change_is_refused(volume, monkeypatch, mode, members, refused):
    volume.chmod(0o700)
    Store.open(volume)
    volume.chmod(mode)
    entry = SimpleNamespace(pw_name="somebody", pw_gid=volume.stat().st_gid)
    monkeypatch.setattr(pwd, "getpwall", lambda: [entry] * members)
    if not refused:
        assert Store.open(volume).path == volume and mode_of(volume) == 0o700
        return
    for look in (Store.open, check_directories):
        with pytest.raises(ConfigError, match=r"can be written by others .* set its mode to 700"):
            look(volume)
    assert mode_of(volume) == mode


@as_root
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777])
def test_another_user_is_told_whose_store_it_is(volume, mode):
    """And not that it is none."""
    os.chown(volume, ME, ME)
    volume.chmod(mode)
    with user(ME):
        leave_home(volume, PLAIN, 1, last_use_s=5000)
    said = {
        0o700: rf"user {OTHER} has no permission to read {volume}, which belongs to user {ME}",
        0o755: rf"{volume} belongs to user {ME}, not to user {OTHER}: run this as its owner",
        0o777: rf"the store in {volume} belongs to user {ME}: run this as that user",
    }[mode]
    volume.chmod(mode)  # opening it made it private
    run_here("inspect", volume)  # imports what the other user may not read
    with user(OTHER):
        done = run_here("inspect", volume)
    assert (done.exit_code, done.stdout) == (2, "") and said in done.stderr
    assert "is not a kvdisk store" not in done.stderr
    if mode == 0o777:
        with user(OTHER):
            assert Store.open(volume).path == volume / f"kvdisk-{OTHER}", "each user has one"


@as_root
@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_directory_that_cannot_be_written_is_refused_before_anything_is_made(volume, mode):
    volume.chmod(mode)
    with user(OTHER):
        for look in (check_directories, Store.open):
            with pytest.raises(ConfigError, match=f"user {OTHER} has no permission to write in {volume}, which"):
                look(volume)
            with pytest.raises(ConfigError, match=f"no permission to write in {volume.parent}, which"):
                look(volume.parent / "absent")
    assert not list(volume.iterdir())


@pytest.mark.parametrize(("name", "is_store"), [("kv", False), ("kv", True), ("kv/to be made", False)])
def test_a_file_system_that_cannot_be_written_is_refused(volume, monkeypatch, name, is_store):
    volume.chmod(0o700)
    if is_store:
        Store.open(volume)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(ConfigError, match=f"{volume} is on a file system that is mounted read-only"):
        check_directories(volume.parent / name)


@as_root
def test_a_part_of_anothers_store_is_not_said_to_be_missing(volume):
    volume.chmod(0o700)
    Store.open(volume)
    with user(OTHER):
        done = run_here("verify", volume / "homes")
    assert done.exit_code == 2 and f"no permission to read {volume}/homes" in done.stderr
