# SPDX-License-Identifier: Apache-2.0
"""On vLLM's real scheduler: requests with LoRA adapters, whose blocks are known by what the
adapter's files hold."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from adapter_files import write_adapter
from schedulers import BLOCK_TOKENS, BLOCKS, PROMPT, Bench, Engines
from vllm.lora.request import LoRARequest

from kvdisk.connector.lora import _FILES_CLOCK
from kvdisk.messages import JobKind


def start(engines: Engines, **more: Any) -> Bench:
    """Make an engine for adapters, later than their files by the clock of these."""
    now_ns = time.clock_gettime_ns(_FILES_CLOCK)
    while time.clock_gettime_ns(_FILES_CLOCK) == now_ns:
        time.sleep(0.001)
    return engines.make(adapters=True, **more)


def serve(bench: Bench, name: str, folder: Path | str | None, *, number: int = 1, called: str = "tuned") -> None:
    """Serve the prompt with an adapter, and forget what the GPU has."""
    adapter = None if folder is None else LoRARequest(called, number, str(folder))
    bench.serve(name, PROMPT, lora_request=adapter)
    bench.forget()


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "tuned", 1)


def test_an_adapters_blocks_are_its_own(engines, tuned, tmp_path):
    other = write_adapter(tmp_path / "other", 2)
    bench = start(engines)
    for name, folder, number in (("base", None, 1), ("a", tuned, 1), ("b", other, 2)):
        serve(bench, name, folder, number=number, called=f"adapter {number}")
    assert not bench.loads()
    assert len(set(bench.stored())) == 3 * BLOCKS, "not one block is shared"
    serve(bench, "again", tuned, called="adapter 1")
    assert bench.loads() == [("again", BLOCKS)]
    assert [move.key for job in bench.jobs_of(JobKind.LOAD) for move in job.moves] == bench.keys("a")


def test_the_engines_own_cache_knows_it_by_its_content_too(engines, tuned):
    """A block that it would serve has the key of its content: under another name, too."""
    bench = start(engines)
    bench.serve("a", PROMPT, lora_request=LoRARequest("tuned", 1, str(tuned)))
    bench.serve("b", PROMPT, lora_request=LoRARequest("again", 2, str(tuned)))
    assert len(bench.stored()) == BLOCKS and not bench.loads()


@pytest.mark.parametrize("linked", [False, True])
def test_two_names_of_one_content_share(engines, tuned, tmp_path, linked):
    copy = tmp_path / "copy"
    if linked:
        (tmp_path / "way").symlink_to(tuned.name)
        copy.symlink_to("way")
    else:
        shutil.copytree(tuned, copy)
    bench = start(engines)
    serve(bench, "a", tuned)
    serve(bench, "b", copy, number=2, called="another name")
    assert bench.loads() == [("b", BLOCKS)]


def test_what_a_request_generates_is_known_by_it_too(engines, tuned):
    bench = start(engines, extra={"store_decode": True})
    adapter = LoRARequest("tuned", 1, str(tuned))
    first = bench.serve("a", PROMPT, 3 * BLOCK_TOKENS, lora_request=adapter)
    assert bench.stored() == bench.keys("a")[: len(bench.stored())] and len(bench.stored()) > BLOCKS
    assert first.lora_request is adapter, "vLLM finds its adapter by its own request"
    bench.forget()
    bench.serve("b", first.all_token_ids, lora_request=adapter)
    assert bench.loads() == [("b", len(bench.keys("a")))]


def test_one_that_was_retrained_under_its_name_misses(engines, tuned):
    serve(start(engines, nvme=True), "a", tuned)
    for seed, hits in ((2, False), (1, True)):  # trained again; and as it was
        engines.end()
        write_adapter(tuned, seed)
        bench = start(engines, nvme=True)
        serve(bench, "a", tuned)
        assert bench.loads() == ([("a", BLOCKS)] if hits else [])


def _rewrite(folder: Path) -> None:
    write_adapter(folder, 2)


def _set(folder: Path) -> None:
    write_adapter(folder, 1, lora_alpha=32)


def _rename(folder: Path) -> None:
    folder.rename(folder.with_name("before"))
    folder.with_name("next").rename(folder)


def _relink(folder: Path) -> None:
    folder.with_name("new").symlink_to("next")
    os.replace(folder.with_name("new"), folder.with_name("link"))


@pytest.mark.parametrize("change", [_rewrite, _set, _rename, _relink])
@pytest.mark.parametrize("seen", [True, False], ids=["known", "not seen before"])
def test_one_that_changes_while_the_engine_runs_is_left_alone(
    engines: Engines, tuned: Path, change: Callable[[Path], None], seen: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody can tell which of the two the workers have read."""
    write_adapter(tuned.with_name("next"), 2)
    link = tuned.with_name("link")
    link.symlink_to("tuned")
    path = link if change is _relink else tuned
    bench = start(engines)
    if seen:
        serve(bench, "a", path)
    bench.jobs.clear()
    change(tuned)
    with caplog.at_level(logging.WARNING):
        serve(bench, "b", path)
    assert not bench.jobs
    assert "has changed since this engine began" in caplog.text


def test_a_number_that_stands_for_two_is_left_alone(engines, tuned, tmp_path):
    """vLLM's workers have the first one of them; the numbers must differ, and nobody sees to it."""
    other = write_adapter(tmp_path / "other", 2)
    bench = start(engines)
    serve(bench, "a", tuned)
    bench.jobs.clear()
    serve(bench, "b", other)
    serve(bench, "c", tuned)
    assert not bench.jobs


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_one_that_cannot_be_read_is_left_alone(engines, tuned, file, caplog):
    (tuned / file).unlink()
    if file.endswith("safetensors"):
        (tuned / file).write_bytes(b"no header")
    bench = start(engines)
    with caplog.at_level(logging.WARNING):
        serve(bench, "a", tuned)
    assert not bench.jobs and "the adapter tuned are left alone" in caplog.text


def test_events_do_not_say_which_tokens_an_adapters_blocks_have(engines, tuned):
    """A reader would take them for the base model's."""
    bench = start(engines, events=True)
    serve(bench, "a", tuned)
    told = [event for event in bench.published if getattr(event, "medium", "GPU") != "GPU"]
    assert told and not any(event.token_ids for event in told)
