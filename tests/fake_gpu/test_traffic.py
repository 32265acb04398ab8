# SPDX-License-Identifier: Apache-2.0
"""Random traffic on the fake GPU brings right bytes, with no missing wait, whichever way it goes
and whatever fails."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import pytest

from fake_gpu import control
from fake_gpu.traffic import VARIANTS, run_apart, run_seed
from kvdisk.worker.block_copies import BlockCopies
from kvdisk.worker.copier import CudaCopier
from kvdisk.worker.copier_base import Passed
from kvdisk.worker.runner import Runner
from kvdisk.worker.slot_headers import SlotHeaders

pytestmark = pytest.mark.fake_gpu
SEEDS, TORTURE_SEEDS, PLANTED_SEEDS = (0, 2), (2, 40), (0, 5)
MORE_SEEDS = {"sleeps": 8}
"""Of variants whose faults show in few seeds."""
HERE = [name for name, variant in VARIANTS.items() if not variant.environment]
APART = [name for name, variant in VARIANTS.items() if variant.environment]
CALLS = {
    "straight": "cudaMemcpy2DAsync",
    "long-straight": "cudaMemcpy2DAsync",
    "breaks-straight": "cudaMemcpy2DAsync",
    "scratch": "aten::index_copy_",
    "staged": "aten::mul",
}
"""What a variant must have called, beside what all do."""
COUNTS = {
    "kernels-fail": ("failed_stores", "failed_loads"),
    "kernels-fail-staged": ("failed_stores",),
    "copies-full": ("failed_loads",),
    "kernels-end": ("failed_loads",),
}
"""What the manager must have counted, after ``MOST_SEEDS`` at the latest: which call fails depends
on how busy the machine is."""
MOST_SEEDS = 12


def check(name, seeds, directory):
    """Run seeds of a variant, and see that it went its way."""
    before = Counter(control.counts()) + Counter(control.counts(kernels=True))
    done, found, failed = Counter(), Counter(), control.failed()
    first, end = seeds
    for seed in range(first, max(end, first + MOST_SEEDS)):
        if seed >= end and all(found[each] for each in COUNTS.get(name, ())):
            break
        outcome = run_seed(seed, VARIANTS[name], directory / str(seed))
        assert outcome.is_right, outcome
        done.update(outcome.jobs)
        found.update(outcome.counts)
        done["looks"] += outcome.looks
        done["preempted"] += outcome.preempted
    assert all(done[what] for what in ("store", "load", "looks", "preempted")), done
    assert done["demote"] or VARIANTS[name].values.get("cpu_bytes") == 0, done
    called = Counter(control.counts()) + Counter(control.counts(kernels=True)) - before
    assert name not in CALLS or called[CALLS[name]], called
    assert all(found[each] for each in COUNTS.get(name, ())), found
    assert control.failed() > failed or not VARIANTS[name].fails, "nothing has failed"


@pytest.mark.parametrize("name", HERE)
def test_a_few_seeds(name, tmp_path):
    check(name, (SEEDS[0], MORE_SEEDS.get(name, SEEDS[1])), tmp_path)


@pytest.mark.parametrize("name", APART)
def test_a_few_seeds_in_a_process_of_their_own(name):
    code, text = run_apart(VARIANTS[name], SEEDS)
    assert code == 0 and text.count(": right,") == SEEDS[1] - SEEDS[0], text


@pytest.mark.torture
@pytest.mark.parametrize("name", HERE)
def test_many_seeds(name, tmp_path):
    check(name, TORTURE_SEEDS, tmp_path)


@pytest.mark.torture
@pytest.mark.parametrize("name", APART)
def test_many_seeds_in_a_process_of_their_own(name):
    code, text = run_apart(VARIANTS[name], TORTURE_SEEDS)
    assert code == 0 and text.count(": right,") == TORTURE_SEEDS[1] - TORTURE_SEEDS[0], text


# -- what is wrong shows ---------------------------------------------------------------------------


def outcomes(name, directory):
    return [run_seed(seed, VARIANTS[name], directory / str(seed)) for seed in range(*PLANTED_SEEDS)]


def test_a_wait_that_is_missing_shows_by_order(tmp_path):
    with patch.object(CudaCopier, "hold_model", lambda _: None):
        found = outcomes("scratch", tmp_path)
    assert any(each.races for each in found) and not all(each.is_right for each in found)


def test_a_store_that_is_said_to_be_copied_too_soon_shows_by_order(tmp_path):
    """All its batches have begun, and some go on."""

    def note_copied(self, work):
        if not work.copied and not self._resources.arenas and self.has_launched(work.job.id):
            work.copied = True
            self._report.copied[work.job.id] = 1

    with patch.object(Runner, "_note_copied", note_copied):
        found = outcomes("reuses", tmp_path)
    assert any(each.races for each in found) and not all(each.is_right for each in found)


def test_memory_that_goes_before_its_copies_have_ended_is_a_violation(tmp_path):
    with patch.object(Runner, "await_copies", Runner.halt):
        found = outcomes("closes", tmp_path)
    assert any(each.violations for each in found) and not all(each.is_right for each in found)


def test_a_slot_that_is_sealed_under_its_copy_is_a_violation(tmp_path):
    has_ended = BlockCopies._has_ended

    with patch.object(BlockCopies, "_has_ended", lambda self, batch, _: has_ended(self, batch, Passed())):
        found = outcomes("drive-alone", tmp_path)
    assert any(each.violations for each in found)


def test_a_block_that_is_stored_wrongly_shows_by_bytes(tmp_path):
    def seal(self, batch):
        slot = batch.memory.view(batch.size_class, batch.slots[0])
        slot[-4096] ^= 1  # right under its checksum
        return unharmed(self, batch)

    unharmed = SlotHeaders.seal
    with patch.object(SlotHeaders, "seal", seal):
        found = outcomes("drive-alone", tmp_path)
    assert all(each.error for each in found) and any(each.wrong_bytes for each in found)
