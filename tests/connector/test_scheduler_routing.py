# SPDX-License-Identifier: Apache-2.0
"""What llm-d's router makes of kvdisk's events, which come to it through vLLM's real publisher.

``llmd`` has the router's rules, with the places in its source. ``golden_events.json`` has a stream
as it was sent, and what the router decodes of it.
"""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llmd
import pytest
import zmq
from adapter_files import write_adapter
from schedulers import BLOCK_TOKENS, BLOCKS, PROMPT, Bench, prompt_of
from test_scheduler_adapters import start
from test_scheduler_events import image
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher
from vllm.lora.request import LoRARequest

from kvdisk.blocks import GROUP_BYTES, Tier
from kvdisk.connector.versions import vllm_minor_version
from kvdisk.manager.requests import BlockKeys

GOLDEN = Path(__file__).with_name("golden_events.json")
TOPIC = "kv@10.0.0.7@Qwen/Qwen3-8B"
TIERS = {Tier.CPU: "cpu", Tier.NVME: "storage"}


class Wire:
    """vLLM's publisher, and a subscriber to it that reads what the router's does
    (zmq_subscriber.go:74-86)."""

    def __init__(self, path: Path) -> None:
        self._publisher = ZmqEventPublisher(0, endpoint=f"ipc://{path}", topic=TOPIC)
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(f"ipc://{path}")
        self._socket.subscribe("kv@")  # pool.go:141
        while not self._socket.poll(50):  # until the subscription has arrived
            self._publisher.publish(KVEventBatch(ts=0.0, events=[]))

    def send(self, events: list[Any]) -> bytes:
        """Publish a batch and return the payload that arrived."""
        self._publisher.publish(KVEventBatch(ts=1.0, events=events))
        while True:
            topic, sequence, payload = self._socket.recv_multipart()
            assert llmd.parse_topic(topic.decode()) == ("10.0.0.7", "Qwen/Qwen3-8B")
            assert struct.unpack(">Q", sequence)
            if not events or llmd.decode(payload):
                return payload

    def close(self) -> None:
        self._socket.close(linger=0)
        self._publisher.shutdown()


@pytest.fixture
def wire(tmp_path, monkeypatch) -> Iterator[Wire]:
    for name in ("PYTHONHASHSEED", "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"):
        monkeypatch.delenv(name, raising=False)  # hashes as they are by default
    made = Wire(tmp_path / "events")
    yield made
    made.close()


def stream(engines: Any) -> list[Any]:
    """Return the events of a short life: a prompt is stored, evicted from memory, and loaded."""
    bench = engines.make(nvme=True, events=True)
    bench.serve("a", PROMPT[: 2 * BLOCK_TOKENS + 1])
    bench.forget(Tier.CPU)
    bench.serve("b", PROMPT[: 2 * BLOCK_TOKENS + 1])
    return bench.published


def as_json(events: list[llmd.Event]) -> list[dict[str, Any]]:
    return json.loads(json.dumps([event._asdict() for event in events]))


def test_what_kvdisk_sends_is_what_llm_d_decodes(engines, wire):
    golden = json.loads(GOLDEN.read_text())
    assert as_json(llmd.decode(bytes.fromhex(golden["payload"]))) == golden["decoded"]
    sent = wire.send(stream(engines))
    assert as_json(llmd.decode(sent)) == golden["decoded"]
    assert vllm_minor_version() != (0, 32) or sent.hex() == golden["payload"]
    assert {event["medium"] for event in golden["decoded"]} == {"GPU", "CPU", "STORAGE", ""}
    assert {event["tag"] for event in golden["decoded"]} == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


def test_hashes_that_are_sent_whole_are_decoded_to_the_same(engines, wire, monkeypatch):
    golden = json.loads(GOLDEN.read_text())
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    assert as_json(llmd.decode(wire.send(stream(engines)))) == golden["decoded"]


def believed(router: llmd.Router, tier: Tier) -> set[int]:
    return router.held(TIERS[tier], 0)


def there(bench: Bench, tier: Tier) -> set[int]:
    """Return vLLM's blocks that a tier has."""
    (group,), stored = bench.connector.scheduler._geometry.groups, bench.in_tier(tier)
    prompts = [BlockKeys(request.block_hashes, group, BLOCK_TOKENS) for request in bench.known.values()]
    units = {key: keys.of_gpu(at) for keys in prompts for at, key in enumerate(keys)} if group.gpu_blocks > 1 else {}
    return {int.from_bytes(one[:-GROUP_BYTES][-8:], "big") for key in stored for one in units.get(key, [key])}


def digest(router: llmd.Router, bench: Bench, wire: Wire) -> None:
    router.digest(llmd.decode(wire.send(bench.published)) if bench.published else [])
    bench.published.clear()


@pytest.mark.parametrize("unit_tokens", ["off", 2 * BLOCK_TOKENS])
@pytest.mark.parametrize("tokens_of_a_key", [16, BLOCK_TOKENS])
def test_the_router_believes_what_is_there(tokens_of_a_key, unit_tokens, engines, wire):
    """Tiny tiers, whose copies come and leave all the time."""
    rng = random.Random(tokens_of_a_key)
    extra = {"cpu_bytes": "200KiB", "nvme_bytes": "11MiB", "segment_bytes": "256KiB", "unit_tokens": unit_tokens}
    bench, router = engines.make(nvme=True, events=True, extra=extra), llmd.Router(tokens_of_a_key)
    for number in range(60):
        first = 100 * rng.randrange(8)
        bench.serve(f"r{number}", range(first, first + rng.randrange(40, 9 * BLOCK_TOKENS)))
        digest(router, bench, wire)
        for tier in TIERS:
            assert believed(router, tier) == there(bench, tier), (number, tier)
    assert bench.counters()["evicted_blocks.cpu"] > 0 and bench.counters()["evicted_blocks.nvme"] > 0


def test_after_a_restart_a_router_that_stayed_knows_the_drive_and_a_new_one_learns_by_and_by(engines, wire):
    """A block that is found at the start is told by its hash alone."""
    old, new = llmd.Router(BLOCK_TOKENS), llmd.Router(BLOCK_TOKENS)
    bench = engines.make(nvme=True, events=True)
    bench.serve("a", PROMPT)
    digest(old, bench, wire)
    engines.close()
    bench = engines.make(nvme=True, events=True)
    while bench.connector.scheduler._journal.waits:
        bench.step()
    found = wire.send(bench.published)
    for router in (old, new):
        router.digest(llmd.decode(found))
    bench.published.clear()
    assert believed(old, Tier.NVME) == there(bench, Tier.NVME) and len(there(bench, Tier.NVME)) == BLOCKS
    assert not new.keys and new.skipped == BLOCKS
    bench.serve("a", PROMPT)
    digest(new, bench, wire)
    assert believed(new, Tier.CPU) == there(bench, Tier.CPU) and len(there(bench, Tier.CPU)) == BLOCKS
    assert not believed(new, Tier.NVME), "until they are written again"


def test_after_a_restart_of_units_a_router_learns_all_blocks_with_the_first_request_for_them(engines, wire):
    """Of those on the drive too: their hashes are known again."""
    extra, router = {"unit_tokens": 2 * BLOCK_TOKENS}, llmd.Router(BLOCK_TOKENS)
    engines.make(nvme=True, events=True, extra=extra).serve("a", PROMPT)
    engines.close()
    bench = engines.make(nvme=True, events=True, extra=extra)
    while bench.connector.scheduler._journal.waits:
        bench.step()
    digest(router, bench, wire)
    assert not router.keys
    bench.serve("b", PROMPT)
    digest(router, bench, wire)
    for tier in TIERS:
        assert believed(router, tier) == there(bench, tier) and len(there(bench, tier)) == BLOCKS


SALT = [("tenant",), *[()] * (BLOCKS - 1)]
IMAGE = [("picture",), ("picture",), (), ()]


@pytest.mark.parametrize(
    ("more", "extra"),
    [
        ({"cache_salt": "tenant"}, SALT),
        ({"mm_features": [image("picture", 5, BLOCK_TOKENS)]}, IMAGE),
        (
            {"cache_salt": "tenant", "mm_features": [image("picture", 5, BLOCK_TOKENS)]},
            [("picture", "tenant"), *IMAGE[1:]],
        ),
    ],
    ids=["salt", "image", "both"],
)
def test_the_router_finds_what_has_a_salt_or_an_image(more, extra, engines, wire):
    """And nobody else's request finds it. It does so with vLLM's own size of blocks."""
    bench, router = engines.make(nvme=True, events=True), llmd.Router(BLOCK_TOKENS)
    bench.sees_images()
    bench.serve("a", PROMPT, **more)
    digest(router, bench, wire)
    for tier in ("gpu", *TIERS.values()):
        assert router.found(tier, 0, PROMPT, extra, "") == BLOCKS
        for other in ([()] * BLOCKS, [("another",), *extra[1:]]):
            assert router.found(tier, 0, PROMPT, other, "") == 0


def test_the_router_takes_an_adapters_name_for_an_images_too(engines, wire, tmp_path):
    """As it does of vLLM's own blocks: a request's keys have it in the model's place alone."""
    adapter = LoRARequest("tuned", 1, str(write_adapter(tmp_path / "tuned", 1)))
    bench, router = start(engines, nvme=True, events=True), llmd.Router(BLOCK_TOKENS)
    bench.serve("a", PROMPT, lora_request=adapter)
    digest(router, bench, wire)
    for tier in ("gpu", *TIERS.values()):
        assert router.found(tier, 0, PROMPT, [()] * BLOCKS, "tuned") == 0
        assert router.found(tier, 0, PROMPT, [("tuned",)] * BLOCKS, "tuned") == BLOCKS


def test_a_reset_of_vllms_cache_makes_the_router_forget_the_tiers_too(engines, wire):
    """vLLM's AllBlocksCleared names no medium."""
    bench, router = engines.make(nvme=True, events=True), llmd.Router(BLOCK_TOKENS)
    bench.serve("a", PROMPT)
    digest(router, bench, wire)
    assert believed(router, Tier.CPU) == there(bench, Tier.CPU) != set()
    assert bench.scheduler.reset_prefix_cache()
    bench.serve("b", prompt_of(9))
    digest(router, bench, wire)
    assert len(there(bench, Tier.CPU)) == 2 * BLOCKS and len(believed(router, Tier.CPU)) == BLOCKS


def test_the_pages_settings_are_vllms_and_the_routers():
    page = (Path(__file__).resolve().parents[2] / "docs/ROUTING.md").read_text()
    (said,) = re.findall(r"--kv-events-config '(.*?)'", page, re.DOTALL)
    config = KVEventsConfig(**json.loads(said))
    assert config.enable_kv_cache_events and config.publisher == "zmq" and config.endpoint == "tcp://*:5557"
    assert llmd.parse_topic(config.topic) == ("10.0.0.7", "MODEL")
