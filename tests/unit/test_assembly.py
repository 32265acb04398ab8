# SPDX-License-Identifier: Apache-2.0
"""What the assembly refuses at the start, and how it notes the end."""

from __future__ import annotations

import logging
import re
from unittest.mock import Mock

import pytest
from support.fake_pool import FakePool

from kvdisk import __version__
from kvdisk.assembly import SchedulerHalf, _gpu_copier, assemble_scheduler
from kvdisk.config import Config
from kvdisk.engine_store import EngineStore
from kvdisk.errors import ConfigError, DeviceError
from kvdisk.geometry import Geometry, GroupGeometry
from kvdisk.identity import Identity

GEOMETRY = Geometry((GroupGeometry(0, 16, 8192),), 2, 16)


def test_memory_for_no_block_is_refused():
    with pytest.raises(ConfigError, match="cpu_bytes 16383 is too small for a block of each size"):
        assemble_scheduler(Config(cpu_bytes=16383), GEOMETRY, FakePool(4, print), None)


@pytest.mark.parametrize("with_nvme", [False, True])
def test_a_start_says_in_three_lines_what_fits(tmp_path, caplog, with_nvme):
    """In GiB and tokens; a second start says what it found."""
    nvme = {"store_dirs": (tmp_path / "kv",), "nvme_bytes": 1 << 30} if with_nvme else {}
    config = Config(cpu_bytes=3 << 29, **nvme)
    for verb in ("made", "took over"):
        caplog.clear()
        with caplog.at_level(logging.INFO, "kvdisk"):
            assemble_scheduler(config, GEOMETRY, FakePool(4, print), Identity.certain(b"\x3f" * 32, {})).close()
        said = [record.getMessage() for record in caplog.records]
        tokens = f"{GEOMETRY.tokens_in(GEOMETRY.memory_slots(3 << 29)) / 1e6:.1f} M tokens"
        cpu = f"kvdisk ready: CPU 1.5 GiB = {tokens}"
        assert said[0] == f"kvdisk {__version__} keeps 1 KiB of KV a token." and len(said) == 3
        if with_nvme:
            assert re.fullmatch(rf"kvdisk {verb} engine store \w+ in {tmp_path}/kv\.", said[1])
            assert re.fullmatch(rf"{cpu}, NVMe 1 GiB = [\d.]+ [kM] tokens; 0 blocks found\.", said[2])
        else:
            assert said[1:] == ["kvdisk has no NVMe tier: store_dirs is not set.", f"{cpu}."]


def test_a_first_start_says_what_of_the_model_is_of_another_namespace(tmp_path, caplog):
    config = Config(cpu_bytes=3 << 29, store_dirs=(tmp_path / "kv",), nvme_bytes=1 << 30)
    said = []
    for model, letter in (("one", b"a"), ("two", b"b"), ("one", b"c"), ("one", b"c")):
        caplog.clear()
        with caplog.at_level(logging.INFO, "kvdisk"):
            identity = Identity.certain(letter * 32, {"model": model})
            assemble_scheduler(config, GEOMETRY, FakePool(4, print), identity).close()
        said.append([line for line in caplog.messages if "another namespace" in line])
    line = (
        "kvdisk cannot use other engine stores of this model (1), which are of another namespace: see kvdisk inspect."
    )
    assert said == [[], [], [line], []]


@pytest.mark.parametrize(
    ("flushed", "closed", "clean"),
    [
        (True, None, [True]),
        (False, None, [False]),
        (True, DeviceError(5, "gone"), [False]),
        (True, DeviceError(110, "hanging"), []),
    ],
    ids=["committed", "not committed", "not closed", "hanging"],
)
def test_an_end_is_clean_where_all_was_committed(flushed, closed, clean):
    """Where the file system hangs nothing more is written to it."""
    index, home = Mock(), Mock()
    index.flush.return_value, index.close.side_effect = flushed, closed
    SchedulerHalf(Mock(), EngineStore(Mock(), home, index, Mock()), None, None, Mock(), None, [Mock()]).close()
    assert [call.kwargs["clean"] for call in home.close.call_args_list] == clean
    assert home.release.called == (not clean)


def test_a_gpu_without_room_for_scratch_is_one_sentence(monkeypatch):
    full = Mock(side_effect=RuntimeError("CUDA out of memory. Tried to allocate 16.00 MiB.\nmore"))
    monkeypatch.setattr("kvdisk.worker.copier.CudaCopier", full)
    with pytest.raises(
        ConfigError, match=r"needs 67108864 bytes of the GPU .*utilization \(CUDA out of memory\. .*\)\.$"
    ):
        _gpu_copier([], Mock(), GEOMETRY)
