# SPDX-License-Identifier: Apache-2.0
"""Every state in which a crash can leave the drive: the store, frozen after each write, commit,
sync and control file.

Each image is opened by a new engine, which must account for all of it and serve the same prompts
with right bytes.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
from pathlib import Path
from unittest.mock import patch

import pytest
from live_children import SEED
from support.live_audit import audit
from support.live_model import LiveModel
from turned import Hook, TurnedEngine, hooked, load_on

from kvdisk.device.listing import list_homes

REQUESTS = 4


class Freezer(Hook):
    """Keeps a copy of the store after each event, or after every so many."""

    def __init__(self, store: Path, images: Path, every: int) -> None:
        self._store = store
        self._images = images
        self._every = every
        self._lock = threading.Lock()
        """The index commits on a thread of its own."""
        self.events: list[str] = []
        self.syncs = 0

    def after(self, what: str) -> None:
        if what == "sync":  # a crash of the process finds the same before and after: see the power loss
            self.syncs += 1
            return
        with self._lock:
            if len(self.events) % self._every == 0:
                copy_sparse(self._store, self.image(len(self.events)))
            self.events.append(what)

    def image(self, number: int) -> Path:
        return self._images / str(number)


def copy_sparse(source: Path, target: Path) -> None:
    """Copy a tree with its modes, leaving holes where there are zeros."""
    subprocess.run(["cp", "-a", "--sparse=always", str(source), str(target)], check=True)  # noqa: S607


def freeze_all(quick_path: Path, model: LiveModel, every: int = 1) -> Freezer:
    """Run two lives of an engine, the second one with a hot start and a change of weights, and
    freeze every state."""
    freezer = Freezer(quick_path / "store", quick_path / "images", every)
    (quick_path / "images").mkdir()
    evicted = 0
    with hooked(freezer):
        for life in range(2):
            engine = TurnedEngine(quick_path / "store", model, freezer)
            load_on(engine, SEED, REQUESTS)
            if life:
                engine.change_weights()
                load_on(engine, SEED, REQUESTS // 2)
            evicted += engine.manager.stats["evicted_blocks.nvme"]
            engine.close()
    assert evicted > 0, "slots were used anew"
    return freezer


def open_image(image: Path, model: LiveModel, *, records_hold: bool = True) -> int:
    """Account for an image and load it; return the tokens that it served from NVMe. Its own syncs
    are left out."""
    with patch("os.fsync"):
        engine = TurnedEngine(image, model, Hook())
        try:
            engine.run_until_quiet()
            audit(engine, records_hold=records_hold)
            load_on(engine, SEED, REQUESTS)
            audit(engine, records_hold=records_hold)
            return engine.manager.stats["hit_tokens.nvme"]
        finally:
            engine.close()


def mix(image: Path, other: Path) -> bool:
    """Give an image's home the index of another moment; False where the home had another name by
    then."""
    (home,) = list_homes(image)
    index = other / "homes" / home.id / "index"
    if not index.exists():
        return False
    shutil.rmtree(home.index_path)
    copy_sparse(index, home.index_path)
    return True


@pytest.mark.parametrize(
    ("windowed", "every"),
    [(True, 16), pytest.param(True, 1, marks=pytest.mark.torture), pytest.param(False, 1, marks=pytest.mark.torture)],
)
def test_every_crash_image(windowed: bool, every: int, quick_path: Path) -> None:
    """Or every so many of them."""
    model = LiveModel(windowed=windowed)
    freezer = freeze_all(quick_path, model, every)
    assert {"write", "commit", "control", "segment"} == set(freezer.events)
    assert freezer.syncs > 0
    served = 0
    for number, what in list(enumerate(freezer.events))[::every]:
        try:
            served += open_image(freezer.image(number), model) > 0
        except BaseException as error:
            error.add_note(f"image {number} of {len(freezer.events)}, after a {what}, seed {SEED}, {model}")
            raise
        shutil.rmtree(freezer.image(number))
    assert served > len(freezer.events) // every // 10, "what was committed is served"


def test_power_loss(quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Index and data of different moments, as the drive writes them when it likes; and the machine
    has started anew."""
    model = LiveModel()
    freezer = freeze_all(quick_path, model)
    boot_id = quick_path / "boot_id"
    boot_id.write_text("another boot\n")
    monkeypatch.setattr("kvdisk.device.store.BOOT_ID_PATH", boot_id)
    monkeypatch.setattr("kvdisk.device.store.seconds_since_boot", lambda: 0.0)
    commits = [number for number, what in enumerate(freezer.events) if what == "commit"]
    served = 0
    for at, number in enumerate(commits):
        for other in {commits[max(0, at - 3)], commits[min(len(commits) - 1, at + 3)]} - {number}:
            image = quick_path / "mixed"
            copy_sparse(freezer.image(number), image)
            if not mix(image, freezer.image(other)):
                shutil.rmtree(image)
                continue
            try:
                served += open_image(image, model, records_hold=False)
            except BaseException as error:
                error.add_note(f"data of image {number} with the index of {other}, seed {SEED}, {model}")
                raise
            shutil.rmtree(image)
    assert served > 0
