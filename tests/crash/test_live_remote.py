# SPDX-License-Identifier: Apache-2.0
"""Live engines that share nothing but a bucket of a real S3 server: each block that a load brings
is compared, byte by byte."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import obstore
import pytest
from obstore.store import from_url
from support.live_engine import LiveEngine
from support.live_model import LiveModel
from support.s3_proxy import S3Proxy
from support.waits import until

from kvdisk.cli.remote import check_object
from kvdisk.remote import base
from kvdisk.remote.planes import SUFFIX

CODEC = "zstd-planes"
PROMPTS = [f"{letter * 9}{text}" for letter in "abc" for text in ("first and last tokens", "second, of another kind")]


@pytest.fixture
def url() -> str:
    """A place that no other test has."""
    return f"s3://kvdisk-tests/{secrets.token_hex(8)}"


@pytest.fixture
def start(s3_server, url, quick_path: Path) -> Iterator[Callable[..., LiveEngine]]:
    """Start an engine with a store of its own, as on a host of its own. They are closed."""
    engines: list[LiveEngine] = []

    def start(model: LiveModel, *, drive: bool = True, **config: object) -> LiveEngine:
        store = str(quick_path / f"store {len(engines)}")
        values: dict[str, object] = {
            "store_decode": True,
            "cpu_bytes": "2MiB",
            "remote": url,
            "remote_admission": "all",
        }
        values |= {"remote_options": s3_server.options, "remote_deadline_s": 30.0, "lookup_wait_s": 30.0} | config
        made = model.config(store, blocks=200, **values)
        if not drive:
            made = type(made).from_mapping(values)
        engines.append(LiveEngine(made, model))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def has_loaded(engine: LiveEngine) -> int:
    """Return how many blocks came from the remote store."""
    return engine.manager.stats["hit_blocks.remote"] + engine.manager.stats["prefetched_blocks"]


@pytest.mark.parametrize(
    ("windowed", "drive"),
    [(False, True), (True, False), *(pytest.param(at, at, marks=pytest.mark.torture) for at in (False, True))],
)
def test_what_one_host_computed_another_finds_at_its_first_request(start, windowed: bool, drive: bool) -> None:
    model = LiveModel(windowed=windowed)
    one = start(model, drive=drive)
    one.serve(PROMPTS)
    assert one.manager.stats["sent_blocks"] > 20
    two = start(model, drive=drive)
    two.serve(PROMPTS)
    assert has_loaded(two) > 20
    assert not two.manager.stats["failed_loads"]
    assert not two.manager.stats["remote_rejects"]


def test_engines_with_the_codec_and_without_it_share_a_bucket(start, s3_server, url) -> None:
    """One that codes finds both kinds; one that does not takes the coded for a miss, and sends its
    own, which the first does not send again."""
    model = LiveModel()
    start(model, remote_codec=CODEC).serve(PROMPTS[:3])
    plain = start(model)
    plain.serve(PROMPTS[:3])
    assert has_loaded(plain) == 0 and not plain.manager.stats["remote_rejects"]
    plain.serve(PROMPTS)
    bucket = from_url(url, config=s3_server.options, client_options={"allow_http": True})
    sizes = {meta["path"]: meta["size"] for page in obstore.list(bucket) for meta in page}
    coded = {name.removesuffix(SUFFIX) for name in sizes if name.endswith(SUFFIX)}
    assert coded and coded < {name for name in sizes if not name.endswith(SUFFIX)}
    assert all(sizes[name + SUFFIX] < sizes[name] for name in coded)
    two = start(model, remote_codec=CODEC)
    two.serve(PROMPTS)
    assert has_loaded(two) > 20
    for name in ("failed_loads", "failed_promotions", "remote_rejects", "failed_stores"):
        assert not two.manager.stats[name], name
    names = {meta["path"] for page in obstore.list(bucket) for meta in page}
    assert {name for name in names if name.endswith(SUFFIX)} == {name + SUFFIX for name in coded}
    another = start(model)
    another.serve(PROMPTS)
    assert has_loaded(another) > 20 and not another.manager.stats["remote_rejects"]


def test_where_one_rank_has_lost_its_part_the_block_is_computed(start, s3_server, url) -> None:
    model = LiveModel()
    assert model.ranks > 1
    start(model).serve(PROMPTS)
    bucket = from_url(url, config=s3_server.options, client_options={"allow_http": True})
    names = [meta["path"] for page in obstore.list(bucket) for meta in page]
    obstore.delete(bucket, [name for name in names if name.rpartition("/")[2].startswith("r1of")])
    two = start(model)
    two.serve(PROMPTS)
    stats = two.manager.stats
    assert stats["failed_loads"] + stats["failed_promotions"] > 0
    assert not stats["remote_rejects"], "another host may write them again"


def test_another_model_finds_nothing(start) -> None:
    start(LiveModel()).serve(PROMPTS)
    other = start(LiveModel(name="another"))
    other.serve(PROMPTS)
    assert other.manager.stats["remote_questions"] > 0
    assert has_loaded(other) == 0


def test_what_two_requests_wanted_is_sent_by_default(start) -> None:
    one = start(LiveModel(), remote_admission="reuse(2)")
    one.serve(PROMPTS[:1])
    assert one.manager.stats["sent_blocks"] == 0
    one.serve(PROMPTS[:1])
    assert one.manager.stats["sent_blocks"] > 0


def test_who_only_reads_sends_nothing(start) -> None:
    one = start(LiveModel(), remote_read_only=True)
    one.serve(PROMPTS + PROMPTS)
    assert one.manager.stats["sent_blocks"] == 0


def test_after_new_weights_nothing_is_asked_or_sent(start) -> None:
    model = LiveModel()
    start(model).serve(PROMPTS)
    two = start(model)
    two.serve(PROMPTS[:1])
    before = dict(two.manager.stats.counts)
    two.change_weights()
    two.serve(PROMPTS + PROMPTS)
    for name in ("remote_questions", "sent_blocks", "hit_blocks.remote"):
        assert two.manager.stats[name] == before.get(name, 0), name


@pytest.mark.parametrize(
    ("sealed", "codec"),
    [
        (False, None),
        (True, CODEC),
        pytest.param(True, None, marks=pytest.mark.torture),
        pytest.param(False, CODEC, marks=pytest.mark.torture),
    ],
)
def test_foreign_bytes_are_never_served(start, s3_server, url, tmp_path, sealed: bool, codec: str | None) -> None:
    key = tmp_path / "key"
    key.write_bytes(secrets.token_bytes(32))
    config = {"remote_codec": codec} | ({"remote_key_file": str(key)} if sealed else {})
    model = LiveModel()
    start(model, **config).serve(PROMPTS)
    bucket = from_url(url, config=s3_server.options, client_options={"allow_http": True})
    names = sorted(meta["path"] for page in obstore.list(bucket) for meta in page)
    bodies = [bytes(obstore.get(bucket, name).bytes()) for name in names]
    assert len(names) > 20
    for at, name in enumerate(names):
        wrong = bytearray(bodies[at])
        wrong[-100 if at % 2 else 100] ^= 0x10  # the payload, or the seal; and the header
        obstore.put(bucket, name, [bytes(wrong), bodies[at - 1], b"", bodies[at][:-1]][at % 4])
    two = start(model, **config)
    two.serve(PROMPTS)
    stats = two.manager.stats
    assert stats["remote_rejects"] > 0
    assert stats["failed_loads"] + stats["failed_promotions"] > 0
    before = stats["remote_rejects"]
    two.serve(PROMPTS)
    assert stats["remote_rejects"] == before, "what was bad is not asked for again"


def test_what_was_damaged_is_written_over_and_another_host_loads_it(start, s3_server, url) -> None:
    """Bits that flipped in objects of the right length, in the header and behind it."""
    model = LiveModel()
    start(model).serve(PROMPTS)
    bucket = from_url(url, config=s3_server.options, client_options={"allow_http": True})
    names = sorted(meta["path"] for page in obstore.list(bucket) for meta in page)
    for at, name in enumerate(names):
        body = bytearray(obstore.get(bucket, name).bytes())
        body[(100, 4096 + 5)[at % 2]] ^= 0x10
        obstore.put(bucket, name, bytes(body))
    two = start(model, remote_admission="reuse(16)")
    two.serve(PROMPTS)
    assert two.manager.stats["remote_rejects"] > 0
    wrong = [name for name in names if check_object(name, memoryview(obstore.get(bucket, name).bytes().to_bytes()))]
    assert len(wrong) < len(names) - 20, "what was computed again was not written over"
    rejected = set(two.manager._remote.bad._bad)
    assert not {name for name in wrong if bytes.fromhex(name.split("/")[-2]) in rejected}
    three = start(model)
    three.serve(PROMPTS)
    assert has_loaded(three) > 20


def is_paused(engine: LiveEngine) -> bool:
    return engine.manager.gauges.read()["remote_paused"] == 1


@pytest.fixture
def long_pauses(monkeypatch) -> None:
    """A store that has failed is left alone for longer than a test takes."""
    for name in ("FIRST_PAUSE_S", "LONGEST_PAUSE_S"):
        monkeypatch.setattr(base, name, 3600.0)


@pytest.mark.usefixtures("long_pauses")
def test_of_a_server_that_was_killed_nothing_is_promised(start, s3_server) -> None:
    model = LiveModel()
    start(model).serve(PROMPTS)
    two = start(model, drive=False, cpu_bytes="192KiB", prefetch=False)
    two.serve(PROMPTS[:1])
    remote = two.manager._remote
    assert remote.hints and set(remote.hints) <= set(remote.usable_hints)
    s3_server.kill()
    try:
        two.serve(PROMPTS[1:3])
        assert is_paused(two)
        assert remote.hints and not remote.usable_hints
        assert any(two.manager._catalog.find(key) < 0 for key in remote.hints), "memory has all that is known"
        before = dict(two.manager.stats.counts)
        two.serve(PROMPTS)
        for name in ("failed_loads", "hit_blocks.remote", "failed_promotions"):
            assert two.manager.stats[name] == before.get(name, 0), name
    finally:
        s3_server.start()


@pytest.mark.usefixtures("long_pauses")
def test_where_only_reads_fail_nothing_is_promised_after_the_first(start, s3_server) -> None:
    model = LiveModel()
    start(model).serve(PROMPTS)
    proxy = S3Proxy(s3_server.options["aws_endpoint"])
    try:
        options = s3_server.options | {"aws_endpoint": proxy.address}
        two = start(model, remote_options=options, prefetch=False, remote_admission="reuse(16)")
        two.serve(PROMPTS[:1])
        assert has_loaded(two) > 0 and not is_paused(two)
        proxy.failing = {"GET"}
        two.serve(PROMPTS[2:3])
        assert two.manager.stats["failed_loads"] > 0
        assert is_paused(two), "the rank that has failed has said so"
        before = dict(two.manager.stats.counts)
        two.serve(PROMPTS[3:])
        assert two.manager.stats["remote_questions"] > before["remote_questions"], "questions are answered"
        for name in ("failed_loads", "hit_blocks.remote"):
            assert two.manager.stats[name] == before.get(name, 0), name
    finally:
        proxy.close()


def test_without_the_key_nothing_is_found(start, tmp_path) -> None:
    keys = [tmp_path / "one", tmp_path / "two"]
    for path in keys:
        path.write_bytes(secrets.token_bytes(40))
    model = LiveModel()
    start(model, remote_key_file=str(keys[0])).serve(PROMPTS)
    two = start(model, remote_key_file=str(keys[1]))
    two.serve(PROMPTS)
    assert two.manager.stats["hit_tokens.remote"] >= two.manager.stats["failed_loads"] >= 0
    assert two.manager.stats["remote_rejects"] > 0


def test_a_server_that_is_down_at_the_start_is_used_when_it_comes(start, s3_server) -> None:
    model = LiveModel()
    s3_server.kill(wipe=True)
    try:
        one = start(model)
        one.serve(PROMPTS[:3])
        assert one.manager.stats["stored_blocks"] > 0
        assert one.manager.stats["sent_blocks"] == 0
    finally:
        s3_server.start()

    def sends() -> bool:
        one.serve(PROMPTS[:3])
        return one.manager.stats["sent_blocks"] > 0

    until(sends, "blocks that are sent")
    two = start(model)

    def finds() -> bool:
        two.serve(PROMPTS[:3])
        return has_loaded(two) > 0

    until(finds, "blocks that are found")


def test_a_server_that_hangs_holds_up_no_request_for_long(start, s3_server) -> None:
    model = LiveModel()
    start(model).serve(PROMPTS)
    two = start(model, remote_deadline_s=0.5, lookup_wait_s=0.5)
    s3_server.hold()
    try:
        two.serve(PROMPTS)
        assert two.manager.stats["stored_blocks"] > 20
        assert has_loaded(two) == 0
    finally:
        s3_server.resume()


def test_hosts_share_blocks_in_a_mooncake_store(start, mooncake_store) -> None:
    model = LiveModel()
    place = {"remote": mooncake_store.url, "remote_options": {}}
    one = start(model, **place)
    one.serve(PROMPTS)
    assert one.manager.stats["sent_blocks"] > 20
    two = start(model, drive=False, **place)
    two.serve(PROMPTS)
    assert has_loaded(two) > 20
    assert not two.manager.stats["failed_loads"]
    assert not two.manager.stats["remote_rejects"]
