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
from threading import Event
from typing import Any
from unittest.mock import Mock

import pytest
from adapter_files import write_adapter
from schedulers import BLOCK_TOKENS, BLOCKS, PROMPT, Bench, Engines, prompt_of
from vllm.lora.request import LoRARequest

from kvdisk.blocks import Tier
from kvdisk.connector import lora, weights
from kvdisk.connector.lora import _FILES_CLOCK
from kvdisk.device.mounts import Mount
from kvdisk.messages import JobKind


def start(engines: Engines, **more: Any) -> Bench:
    """Make an engine for adapters, later than their files by the clock of these."""
    now_ns = time.time_ns()  # a file's time may be as fine as this, and that clock stands for some ms
    while time.clock_gettime_ns(_FILES_CLOCK) <= now_ns:
        time.sleep(0.001)
    return engines.make(adapters=True, **more)


def serve(
    bench: Bench, name: str, folder: Path | str | None, *, number: int = 1, called: str = "tuned", **more: Any
) -> None:
    """Serve the prompt with an adapter, and forget what the GPU has."""
    adapter = None if folder is None else LoRARequest(called, number, str(folder), **more)
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


def test_units_of_several_blocks_are_an_adapters_own(engines, tuned):
    bench = start(engines, extra={"unit_tokens": 2 * BLOCK_TOKENS})
    for name, folder in (("base", None), ("a", tuned)):
        serve(bench, name, folder)
    assert not bench.loads()
    serve(bench, "again", tuned)
    assert bench.loads() == [("again", BLOCKS // 2)]
    assert [move.key for job in bench.jobs_of(JobKind.LOAD) for move in job.moves] == bench.keys("a")[1::2]


def test_the_engines_own_cache_does_not_go_by_its_name_either(engines, tuned):
    """A block that it would serve has the key of the path and of its content."""
    bench = start(engines)
    bench.serve("a", PROMPT, lora_request=LoRARequest("tuned", 1, str(tuned)))
    bench.serve("b", PROMPT, lora_request=LoRARequest("again", 2, str(tuned)))
    assert len(bench.stored()) == BLOCKS and not bench.loads()


@pytest.mark.parametrize("linked", [False, True])
def test_two_paths_to_one_content_do_not_share(engines, tuned, tmp_path, linked):
    """What is read of one may change while the other's requests find its blocks on the GPU."""
    copy = tmp_path / "copy"
    if linked:
        (tmp_path / "way").symlink_to(tuned.name)
        copy.symlink_to("way")
    else:
        shutil.copytree(tuned, copy)
    bench = start(engines)
    for name in ("first", "again"):
        serve(bench, f"{name} a", tuned)
        serve(bench, f"{name} b", copy, number=2, called="another")
    assert bench.loads() == [("again a", BLOCKS), ("again b", BLOCKS)]


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


def _flip_last(folder: Path) -> None:
    """Change the last number, far behind the start of any tensor."""
    with (folder / "adapter_model.safetensors").open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)[0]
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last ^ 0x80]))


def test_one_that_changes_in_silence_is_left_alone(engines, tuned, monkeypatch, caplog):
    """As it may over FUSE: its times stay."""
    bench, known = start(engines), lora._statuses
    monkeypatch.setattr(weights, "kind_of", lambda _: Mount("/", "fuse.s3fs"))
    serve(bench, "a", tuned)
    before = known(tuned, [tuned / name for name in ("adapter_config.json", "adapter_model.safetensors")])
    monkeypatch.setattr(lora, "_statuses", lambda *_: before)
    serve(bench, "again", tuned)
    assert bench.loads() == [("again", BLOCKS)]
    _flip_last(tuned)
    bench.jobs.clear()
    with caplog.at_level(logging.WARNING):
        serve(bench, "b", tuned)
    assert not bench.jobs
    assert "has changed since this engine began" in caplog.text


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


@pytest.mark.parametrize("moves", [True, False], ids=["renamed", "with another adapter"])
def test_one_in_a_directory_that_is_another_now_is_left_alone(engines, tmp_path, caplog, moves):
    """The workers may have read it before its first request came."""
    folder, following = tmp_path / "adapters", tmp_path / "next"
    for seed, above in enumerate((folder, following)):
        above.mkdir()
        write_adapter(above / "tuned", seed)
    bench = start(engines)
    if moves:
        folder.rename(tmp_path / "before")
        following.rename(folder)
    else:
        write_adapter(folder / "other", 3)
    with caplog.at_level(logging.WARNING):
        serve(bench, "a", folder / "tuned")
    assert bool(bench.jobs) != moves
    assert ("has changed since this engine began" in caplog.text) == moves


def add(bench: Bench, folder: Path, tokens: int) -> None:
    """Let a request come, up to the step in which its adapter is known: no worker has read it."""
    bench.add("r", PROMPT, tokens, lora_request=LoRARequest("tuned", 1, str(folder)))
    while "r" not in bench.connector.scheduler._requests:
        bench.step()
        assert not bench.sampled("r"), "it was left alone"


@pytest.mark.parametrize("tokens", [1, 3 * BLOCK_TOKENS], ids=["ends at once", "goes on"])
def test_one_that_changes_before_the_workers_read_it_leaves_nothing(engines, tuned, tokens, caplog):
    """What the workers have computed is of the new one. Set back, the old one does not find it."""
    bench = start(engines, nvme=True, events=True, extra={"store_decode": True})
    add(bench, tuned, tokens)
    write_adapter(tuned, 2)
    with caplog.at_level(logging.WARNING):
        bench.run(steps=1000)
    assert bench.stored(), "offered they were"
    assert not bench.in_tier(Tier.CPU) and not bench.in_tier(Tier.NVME)
    assert "has changed since this engine began" in caplog.text
    engines.end()
    write_adapter(tuned, 1)
    bench = start(engines, nvme=True)
    serve(bench, "s", tuned)
    assert not bench.loads()


@pytest.mark.parametrize("tokens", [1, 40], ids=["ends at once", "goes on"])
def test_what_it_leaves_in_the_engines_cache_is_not_stored_later(engines, tuned, tokens):
    bench = start(engines, max_batched_tokens=64, extra={"store_policy": "spillover"})
    add(bench, tuned, tokens)
    keys = set(bench.keys("r"))
    write_adapter(tuned, 2)
    bench.run(steps=1000)
    end_s = time.monotonic() + 60.0
    while not bench.connector.scheduler._adapters.void:
        bench.step()
        assert time.monotonic() < end_s
    for number in range(2, 22):  # more than the GPU has blocks
        bench.serve(f"other {number}", prompt_of(number))
    assert bench.in_tier(Tier.CPU) and not keys & bench.in_tier(Tier.CPU)


def test_what_others_store_meanwhile_is_stored_again(engines, tuned):
    bench = start(engines)
    bench.add("base", prompt_of(2), 100)
    add(bench, tuned, 40)
    write_adapter(tuned, 2)
    bench.run(steps=1000)
    assert bench.in_tier(Tier.CPU) == set(bench.keys("base")[:BLOCKS])


@pytest.mark.parametrize("when", ["before", "after"])
def test_files_that_do_not_answer_delay_nobody_else(engines, tuned, monkeypatch, when, caplog):
    """Nor the request for long: its blocks are computed, and not stored."""
    answers = Event()
    look = lora.Looks._try

    def hang(*arguments: Any) -> lora.Look:
        assert answers.wait(60.0)
        return look(*arguments)

    bench = start(engines)
    try:
        if when == "after":
            add(bench, tuned, 40)
        monkeypatch.setattr(lora, "LOOK_WAIT_S", 0.05)
        monkeypatch.setattr(lora, "CHECK_WAIT_S", 0.0)
        monkeypatch.setattr(lora.Looks, "_try", hang)
        if when == "before":
            bench.add("r", PROMPT, 40, lora_request=LoRARequest("tuned", 1, str(tuned)))
        bench.add("base", prompt_of(2), 100)
        start_s = time.monotonic()
        bench.step()
        assert time.monotonic() - start_s < 30.0
        with caplog.at_level(logging.WARNING):
            bench.finish("base", count=100)
        assert len(bench.sampled("r")) == 40
        stored, base = bench.in_tier(Tier.CPU), set(bench.keys("base")[:BLOCKS])
        # The stores that are out when an adapter is given up fail, whose they are is not asked; in
        # so few steps they are not all made again.
        assert stored == base if when == "before" else stored <= base
        assert "did not answer in time" in caplog.text
    finally:
        answers.set()
        monkeypatch.undo()
    serve(bench, "later", tuned)
    assert bench.in_tier(Tier.CPU) >= set(bench.keys("later")), "its bytes are the same"


def test_one_error_passes(engines, tuned, monkeypatch, caplog):
    bench = start(engines)
    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING):
        broken.setattr(lora, "_statuses", Mock(side_effect=OSError(5, "Input/output error")))
        serve(bench, "a", tuned)
    assert not bench.jobs and "Input/output error" in caplog.text
    serve(bench, "b", tuned)
    assert bench.stored() == bench.keys("b")


def test_change_times_alone_change_nothing(engines, tuned, caplog):
    """As ``chmod`` moves them, or what mounts a volume."""
    bench = start(engines)
    serve(bench, "a", tuned)
    for path in (tuned, *tuned.iterdir()):
        path.chmod(path.stat().st_mode)
    with caplog.at_level(logging.INFO, "kvdisk"):
        serve(bench, "b", tuned)
    assert bench.loads() == [("b", BLOCKS)]
    assert "its bytes are the same" in caplog.text


@pytest.mark.parametrize("is_3d", [False, True], ids=["paths", "layouts of one"])
def test_a_number_that_stands_for_two_is_left_alone(engines, tuned, tmp_path, caplog, is_3d):
    """vLLM's workers have the first one of them; the numbers must differ, and nobody sees to it."""
    other = tuned if is_3d else write_adapter(tmp_path / "other", 2)
    bench = start(engines)
    serve(bench, "a", tuned)
    bench.jobs.clear()
    with caplog.at_level(logging.WARNING):
        serve(bench, "b", other, is_3d_lora_weight=is_3d)
        serve(bench, "c", tuned)
    assert not bench.jobs
    assert "its number, 1, has stood for two paths or layouts" in caplog.text


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_one_that_cannot_be_read_is_left_alone(engines, tuned, file, caplog):
    (tuned / file).unlink()
    if file.endswith("safetensors"):
        (tuned / file).mkdir()
    bench = start(engines)
    with caplog.at_level(logging.WARNING):
        serve(bench, "a", tuned, called="tuned\nforged")
    assert not bench.jobs and "the adapter tuned\ufffdforged: " in caplog.text


def test_events_of_an_adapters_blocks_name_it(engines, tuned):
    """Or a reader would take them for the base model's."""
    bench = start(engines, events=True)
    serve(bench, "a", tuned)
    told = [event for event in bench.published if getattr(event, "medium", "GPU") != "GPU"]
    assert told and all(event.token_ids and event.lora_name for event in told)
