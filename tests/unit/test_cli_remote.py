# SPDX-License-Identifier: Apache-2.0
"""What the commands say of a remote store: a real S3 server, and what its users may do there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import uuid
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
from cli_stores import PLAIN, json_of, refused, run, run_here
from mass_stores import Layer
from obstore.store import from_url
from support.memory_objects import MemoryObjects
from support.s3_proxy import MOST_BYTES, S3Proxy
from support.s3_server import RIGHTS
from test_cli_why import PROMPT, answered, described, keys_of, put

from kvdisk.blocks import make_block_key
from kvdisk.cli import check, remote
from kvdisk.cli.remote import RemoteVerdict, check_object, survey_remote, verify_remote
from kvdisk.config import Config
from kvdisk.device.header import SlotIdentity, seal_slot
from kvdisk.geometry import HEADER_BYTES, Namespace
from kvdisk.remote.base import ObjectOp, ObjectsOutcome, RemoteObject, Result, object_name
from kvdisk.remote.client import open_remote
from kvdisk.remote.coding import CODEC_TYPES
from kvdisk.remote.obstore_bucket import Listed, why_failed
from kvdisk.remote.planes import SUFFIX, PlanesCodec

PAYLOAD_BYTES = 5000
SLOT_BYTES = HEADER_BYTES + 8192
OBJECTS, RANKS = 10, 2
SOME, OTHER = b"\x3f" * 32, b"\x9b" * 32


def slot_of(number: int, rank: int = 0, fingerprint: bytes = SOME) -> tuple[str, bytearray]:
    """Return the name of a block's part, and its bytes."""
    namespace, key = Namespace(fingerprint, 0), make_block_key(number.to_bytes(4, "big") * 8, 0)
    body = bytearray(number.to_bytes(4, "big") * (SLOT_BYTES // 4))
    seal_slot(memoryview(body), SlotIdentity(namespace, key, 7, PAYLOAD_BYTES, rank, RANKS), None)
    return object_name(namespace, key, rank, RANKS), body


class Remote:
    """A prefix of the server, and a configuration that names it."""

    def __init__(self, directory: Path, options: dict[str, str], prefix: str) -> None:
        self.url = f"s3://kvdisk-tests/{prefix}"
        self._directory, self._options = directory, options
        self.bucket = from_url(self.url, config=options, client_options={"allow_http": True})

    def file(self, options: dict[str, str] | None = None, **settings: Any) -> Path:
        """Write a configuration."""
        settings = {"remote": self.url, "cpu_bytes": "32Mi"} | settings
        settings["remote_options"] = self._options | (options or {})
        file = self._directory / "kvdisk.json"
        file.write_text(json.dumps(settings))
        return file

    def config(self, **settings: Any) -> Config:
        return Config.from_mapping(json.loads(self.file(**settings).read_text()))

    def fill(self, config: Config, fingerprint: bytes = SOME, objects: int = OBJECTS) -> None:
        """Send blocks as an engine does."""
        client = open_remote(config)
        slots = [slot_of(at // RANKS, at % RANKS, fingerprint) for at in range(objects)]
        client.submit(ObjectOp.PUT, [RemoteObject(name, memoryview(body)) for name, body in slots])
        (outcome,) = client.poll(60.0)
        assert set(outcome.results) == {Result.OK}
        client.close()

    @property
    def names(self) -> list[str]:
        return [one["path"] for page in obstore.list(self.bucket) for one in page]


@pytest.fixture
def there(tmp_path, s3_server) -> Remote:
    return Remote(tmp_path, s3_server.options, f"{uuid.uuid4().hex}/kv")


# -- check -------------------------------------------------------------------------------------


def test_a_remote_store_that_works_is_measured_and_nothing_is_left(there):
    done = run("check", there.file(), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    trial = json.loads(done.stdout)["remote"]
    assert trial["url"] == there.url and trial["object_bytes"] == 1 << 20
    assert min(trial["missing_s"], trial["put_s"], trial["get_s"]) > 0
    assert there.names == []
    lines = run_here("check", there.file()).stdout.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert "An engine can start with this." in lines
    assert re.search(
        r"1\.0 MiB written in \d+ ms, read in \d+ ms, said to be missing in \d+ ms", " ".join(" ".join(lines).split())
    )


def test_a_process_that_had_a_client_does_not_end_by_way_of_python(there):
    """Threads of the client's that come back meanwhile kill it, now and then."""
    program = "import atexit, os; from kvdisk.cli.main import app; atexit.register(os.abort); app()"
    command = [sys.executable, "-c", program, "check", str(there.file()), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["ok"]


@pytest.mark.parametrize(
    ("options", "settings", "said"),
    [
        ({"aws_secret_access_key": "wrong"}, {}, "the credentials are wrong (SignatureDoesNotMatch)"),
        ({"aws_access_key_id": "nobody"}, {}, "the credentials are wrong (InvalidAccessKeyId)"),
        ({"aws_endpoint": "http://127.0.0.1:9"}, {}, "nothing answers at its address"),
        ({"aws_access_key_id": "reader"}, {}, "writing failed: the credentials lack the right: set remote_read_only"),
        ({"aws_access_key_id": "unlisted"}, {}, "no right to list (s3:ListBucket)"),
        ({"aws_access_key_id": "reader"}, {"remote": "s3://no-such-bucket/kv"}, "there is no such bucket"),
    ],
)
def test_what_is_wrong_is_one_sentence(there, options, settings, said):
    done = run_here("check", there.file(options, **settings))
    shown = " ".join(done.stdout.split())
    assert done.exit_code == 1 and said in shown, shown
    assert "An engine can start with this" in shown and done.stderr == ""
    works = said.startswith(("writing", "no right"))
    assert ("and shares blocks once the remote store works." in shown) is not works


def test_a_clock_that_is_wrong_is_no_missing_right(there):
    proxy = S3Proxy()
    proxy.failing, proxy.said = {"GET", "HEAD", "PUT"}, (403, "RequestTimeTooSkewed")
    try:
        done = run_here("check", there.file({"aws_endpoint": proxy.address}))
    finally:
        proxy.close()
    shown = " ".join(done.stdout.split())
    assert "the clock of this host is not that of the store (RequestTimeTooSkewed)" in shown
    assert "right to list" not in shown


def test_who_only_reads_needs_no_right_to_write(there):
    assert "reader" in RIGHTS
    trial = json_of("check", there.file({"aws_access_key_id": "reader"}, remote_read_only=True))["remote"]
    assert trial["missing_s"] > 0 and trial["put_s"] is None


def test_a_server_that_hangs_is_said(there, s3_server):
    s3_server.hold()
    try:
        done = run_here("check", there.file(remote_deadline_s=0.2))
    finally:
        s3_server.resume()
    assert done.exit_code == 1 and "nothing answers at its address" in " ".join(done.stdout.split())


def test_a_missing_package_is_what_an_engine_says(there, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert "needs obstore (pip install obstore)" in refused("check", there.file())


def test_a_store_that_gives_other_bytes_back_is_said(there, monkeypatch):
    monkeypatch.setattr(check, "_timed", lambda *_: 0.1)
    assert "what was read is not what had been written" in " ".join(run_here("check", there.file()).stdout.split())


def test_a_store_that_is_no_bucket_is_tried_and_not_listed(there, monkeypatch):
    for module in (check, remote):
        monkeypatch.setattr(module, "open_listed", lambda _: None)
    assert json_of("check", there.file())["remote"]["get_s"] > 0
    assert "cannot be listed: that takes a bucket" in refused("inspect", "--remote", there.file())


def test_without_credentials_their_servers_are_asked_in_vain():
    said = "Error performing PUT http://169.254.169.254/latest/api/token in 3s - HTTP error: error sending request"
    assert why_failed(said) == "there are no credentials, neither in remote_options nor in the environment"
    assert why_failed("Something else.\nDebug") == "Something else"


# -- inspect -----------------------------------------------------------------------------------


def test_an_empty_remote_store(there):
    assert json_of("inspect", "--remote", there.file())["namespaces"] == []
    assert "no blocks" in run_here("inspect", "--remote", there.file()).stdout
    found = json_of("verify", "--remote", there.file())
    assert (found["objects"], found["ok"]) == (0, True)


def test_namespaces_are_listed_with_objects_bytes_and_ages(there):
    there.fill(there.config())
    there.fill(there.config(), OTHER, 4)
    obstore.put(there.bucket, "kvdisk1/check/1", b"1")
    found = json_of("inspect", "--remote", there.file())
    first, second = found["namespaces"]
    assert (first["fingerprint"], first["objects"], first["bytes"]) == (SOME.hex(), OBJECTS, OBJECTS * SLOT_BYTES)
    assert (second["fingerprint"], second["objects"], second["is_whole"]) == (OTHER.hex(), 4, True)
    assert first["oldest_s"] <= first["newest_s"] <= found["surveyed_s"] + 1
    shown = run_here("inspect", "--remote", there.file()).stdout
    assert "14 objects, 168.0 KiB, in 2 namespaces" in shown
    lines = shown.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert [line.split()[:3] for line in lines[-2:]] == [["3f3f3f3f", "10", "120.0"], ["9b9b9b9b", "4", "48.0"]]


def test_a_listing_that_stops_says_so(there, monkeypatch):
    for module in ("kvdisk.remote.obstore_bucket", "kvdisk.cli.remote"):
        monkeypatch.setattr(f"{module}.PAGE_OBJECTS", 4)
    there.fill(there.config())
    (namespace,) = survey_remote(there.config(), most=8).namespaces
    assert (namespace.objects, namespace.is_whole) == (8, False)
    monkeypatch.setattr(remote, "MOST_LISTED", 8)
    (whole,) = survey_remote(there.config(), most=12).namespaces
    assert (whole.objects, whole.is_whole) == (OBJECTS, True)


def test_the_address_alone_serves_with_what_the_environment_has(there, s3_server, monkeypatch):
    there.fill(there.config())
    for name, value in s3_server.options.items():
        monkeypatch.setenv(name.upper(), value)
    assert json_of("inspect", "--remote", there.url)["namespaces"][0]["objects"] == OBJECTS


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_what_cannot_be_listed_is_refused_in_a_sentence(there, command, tmp_path):
    wrong = there.file({"aws_secret_access_key": "wrong"})
    assert "cannot be listed: the credentials are wrong" in refused(command, "--remote", wrong)
    assert "the credentials lack the right" in refused(
        command, "--remote", there.file({"aws_access_key_id": "unlisted"})
    )
    for arguments in ((), (tmp_path, "--remote", there.file())):
        assert "name the directories of a store, or with --remote a remote store" in refused(command, *arguments)
    (tmp_path / "local.json").write_text('{"cpu_bytes": "1Gi"}')
    assert "names no remote store" in refused(command, "--remote", tmp_path / "local.json")


# -- verify ------------------------------------------------------------------------------------


def test_a_sample_is_read_and_is_the_same_by_seed(there, monkeypatch):
    there.fill(there.config())
    there.fill(there.config(), OTHER)
    found = json_of("verify", "--remote", there.file())
    assert (found["objects"], found["wrong"], found["gone"]) == (2 * OBJECTS, [], 0)
    assert found["read_bytes"] == 2 * OBJECTS * SLOT_BYTES
    read = []
    monkeypatch.setattr(remote, "check_object", lambda name, _body: read.append(name))
    for _ in range(2):
        assert json_of("verify", "--remote", there.file(), "--sample", "5", "--seed", "3")["objects"] == 5
    assert read[:5] == read[5:] and len(set(read)) == 5
    for wrong in ("0", "5%", "-1"):
        assert "--sample is a number of objects" in refused("verify", "--remote", there.file(), "--sample", wrong)


def test_a_large_namespace_is_read_at_random_places(there, monkeypatch):
    for module in ("kvdisk.remote.obstore_bucket", "kvdisk.cli.remote"):
        monkeypatch.setattr(f"{module}.PAGE_OBJECTS", 2)
    monkeypatch.setattr(remote, "_BATCH_BYTES", 3 * SLOT_BYTES)
    slots = [slot_of(number << 24) for number in range(0, 256, 8)]
    for name, body in slots:
        obstore.put(there.bucket, name, bytes(body))
    verdict = verify_remote(there.config(), 1000, seed=1)
    assert verdict.ok and 8 < verdict.objects <= len(slots)


def test_each_object_that_is_wrong_is_named(there):
    there.fill(there.config())
    damaged = {
        slot_of(0)[0]: (lambda body: body.__setitem__(HEADER_BYTES + 9, body[HEADER_BYTES + 9] ^ 1), "checksum"),
        slot_of(1)[0]: (lambda body: body.__setitem__(90, body[90] ^ 1), "header"),
        slot_of(2)[0]: (lambda body: body.__setitem__(slice(None), slot_of(3)[1]), "header"),
        slot_of(3)[0]: (lambda body: body.__delitem__(slice(6000, None)), "header"),
        slot_of(4)[0]: (lambda body: body.__delitem__(slice(100, None)), "header"),
    }
    for name, (damage, _) in damaged.items():
        body = bytearray(obstore.get(there.bucket, name).bytes())
        damage(body)
        obstore.put(there.bucket, name, bytes(body))
    found = json_of("verify", "--remote", there.file(), code=1)
    assert {one["name"]: one["check"] for one in found["wrong"]} == {name: what for name, (_, what) in damaged.items()}
    done = run_here("verify", "--remote", there.file())
    assert done.exit_code == 1 and "5 objects wrong" in done.stdout
    assert f"it is that of {slot_of(3)[0]}: {slot_of(2)[0]}" in done.stdout


def test_coded_objects_are_counted_decoded_and_checked(there, monkeypatch):
    there.fill(there.config(remote_codec="zstd-planes"))
    there.fill(there.config(), OTHER, 4)
    coded = [name for name in there.names if name.endswith(SUFFIX)]
    assert len(coded) == OBJECTS
    first, second = sorted(json_of("inspect", "--remote", there.file())["namespaces"], key=lambda one: -one["objects"])
    assert first["coded_objects"] == OBJECTS and first["coded_bytes"] == first["bytes"] < OBJECTS * SLOT_BYTES / 2
    assert (second["coded_objects"], second["coded_bytes"], second["bytes"]) == (0, 0, 4 * SLOT_BYTES)
    assert "Coded" in run_here("inspect", "--remote", there.file()).stdout
    found = json_of("verify", "--remote", there.file())
    assert (found["objects"], found["ok"]) == (OBJECTS + 4, True)
    assert (
        found["decoded_bytes"] == (OBJECTS + 4) * SLOT_BYTES > found["read_bytes"] == first["bytes"] + second["bytes"]
    )
    first_name, other = slot_of(0)
    coded.remove(first_name + SUFFIX)
    bodies = [bytes(obstore.get(there.bucket, name).bytes()) for name in coded[:2]]
    wrong = dict(zip(coded, [bodies[1], bodies[0][:-1], b"", bytes(SLOT_BYTES)], strict=False))
    other[HEADER_BYTES + 9] ^= 1
    wrong[first_name + SUFFIX] = PlanesCodec().encode(np.frombuffer(other, np.uint8))
    for name, body in wrong.items():
        obstore.put(there.bucket, name, body)
    found = json_of("verify", "--remote", there.file(), code=1)
    assert {one["name"] for one in found["wrong"]} == set(wrong)
    assert {one["check"] for one in found["wrong"]} == {"code", "header", "checksum"}
    monkeypatch.setitem(sys.modules, "zstandard", None)
    found = json_of("verify", "--remote", there.file(), code=1)
    assert not found["wrong"] and {one["what"] for one in found["unread"]} == {"it is coded: install zstandard"}


def test_the_settings_of_a_tier_name_a_remote_store_too(there, tmp_path):
    tier = {"type": "kvdisk", "store_dirs": str(tmp_path / "kv"), "nvme_bytes": "64Mi"}
    settings = json.loads(there.file().read_text())
    del settings["cpu_bytes"]
    whole = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier | settings]}
    (tmp_path / "kvdisk.json").write_text(json.dumps({"kv_connector_extra_config": whole}))
    assert remote.remote_config(str(tmp_path / "kvdisk.json")).remote == there.url


def test_the_size_that_a_listing_names_is_not_taken_for_memory(there, s3_server):
    there.fill(there.config())
    proxy = S3Proxy(s3_server.options["aws_endpoint"])
    proxy.untrue = (b"<Size>%d</Size>" % SLOT_BYTES, b"<Size>%d</Size>" % (1 << 60))
    try:
        found = json_of("verify", "--remote", there.file({"aws_endpoint": proxy.address}), code=1)
    finally:
        proxy.close()
    assert len(found["wrong"]) == found["objects"] == OBJECTS and found["read_bytes"] == 0
    assert {one["what"] for one in found["wrong"]} == {"1024.0 PiB are no slot"}


def test_a_body_without_an_end_is_not_read_on(there, s3_server):
    there.fill(there.config(), objects=RANKS)
    proxy = S3Proxy(s3_server.options["aws_endpoint"])
    try:
        config = Config.from_mapping(json.loads(there.file({"aws_endpoint": proxy.address}).read_text()))
        with closing(open_remote(config)) as objects:
            name, body = slot_of(0)
            proxy.endless = True
            buffer = bytearray(len(body))
            objects.submit(ObjectOp.GET, [RemoteObject(name, memoryview(buffer))])
            (outcome,) = objects.poll(60.0)
        assert proxy.sent_bytes < MOST_BYTES
        assert outcome.results == (Result.BAD,) or buffer == body
    finally:
        proxy.close()


def test_a_key_file_tells_what_somebody_else_wrote(there, tmp_path):
    (tmp_path / "key").write_bytes(b"k" * 32)
    sealed = {"remote_key_file": str(tmp_path / "key")}
    there.fill(there.config(**sealed))
    assert json_of("verify", "--remote", there.file(**sealed))["objects"] == OBJECTS
    name, body = slot_of(1)
    obstore.put(there.bucket, name, bytes(body) + bytes(32))
    (wrong,) = json_of("verify", "--remote", there.file(**sealed), code=1)["wrong"]
    assert (wrong["name"], wrong["check"]) == (name, "seal")
    obstore.put(there.bucket, name, b"short")
    (wrong,) = json_of("verify", "--remote", there.file(**sealed), code=1)["wrong"]
    assert wrong["name"] == name


class Slow(MemoryObjects):
    """A store that answers in time where it is asked for few objects together, and never of
    ``stuck``."""

    def __init__(self, objects: Sequence[tuple[str, bytearray]], together: int, stuck: str = "") -> None:
        super().__init__({name: bytes(body) for name, body in objects})
        self._together, self._stuck = together, stuck
        self.batches: list[int] = []

    def submit(self, op: ObjectOp, batch: Sequence[RemoteObject]) -> int:
        self.batches.append(len(batch))
        return super().submit(op, batch)

    def poll(self, timeout_s: float = 0.0) -> list[ObjectsOutcome]:
        names = [one.name for _, _, batch in self._batches for one in batch]
        (outcome,) = super().poll(timeout_s)
        late = [at >= self._together or name == self._stuck for at, name in enumerate(names)]
        results = (Result.LATE if is_late else one for is_late, one in zip(late, outcome.results, strict=True))
        return [outcome._replace(results=tuple(results))]


def read_with(objects: Slow, slots: Sequence[tuple[str, bytearray]]) -> RemoteVerdict:
    verdict = RemoteVerdict("s3://nowhere", 0)
    remote._read_all(objects, [Listed(name, len(body), 0) for name, body in slots], 0, verdict)
    return verdict


def test_what_is_late_beside_others_is_read_alone():
    slots = [slot_of(number) for number in range(50)]
    verdict = read_with(Slow(slots, together=1), slots)
    assert (verdict.objects, verdict.ok) == (50, True)


def test_what_is_always_late_is_neither_wrong_nor_good(there, monkeypatch):
    slots = [slot_of(number) for number in range(5)]
    slots[1][1][HEADER_BYTES + 9] ^= 1
    verdict = read_with(Slow(slots, together=64, stuck=slots[3][0]), slots)
    assert verdict.late == [slots[3][0]] and not verdict.ok
    assert [(one.name, one.check) for one in verdict.wrong] == [(slots[1][0], "checksum")]
    assert verdict.objects == 4
    there.fill(there.config())
    filled = [slot_of(at // RANKS, at % RANKS) for at in range(OBJECTS)]
    monkeypatch.setattr(remote, "open_remote", lambda _: Slow(filled, together=64, stuck=filled[0][0]))
    found = json_of("verify", "--remote", there.file(), code=1)
    assert (found["late"], found["wrong"], found["objects"]) == ([filled[0][0]], [], OBJECTS - 1)
    shown = " ".join(run_here("verify", "--remote", there.file()).stdout.split())
    assert "all that was read is good; of 1 nothing is known" in shown
    assert "1 object: with a higher remote_deadline_s" in shown


def test_of_a_store_that_answers_nothing_more_is_not_asked_for_ever():
    slots = [slot_of(number) for number in range(1000)]
    objects = Slow(slots, together=0)
    verdict = read_with(objects, slots)
    assert len(verdict.late) == 1000 and not verdict.wrong and not verdict.objects
    assert len(objects.batches) <= 3


def test_what_is_gone_when_it_is_read_is_no_fault(there, monkeypatch):
    there.fill(there.config())
    sample = remote._sample

    def delete_one(*arguments):
        chosen = sample(*arguments)
        obstore.delete(there.bucket, chosen[0].name)
        return chosen

    monkeypatch.setattr(remote, "_sample", delete_one)
    found = json_of("verify", "--remote", there.file())
    assert (found["objects"], found["gone"]) == (OBJECTS - 1, 1)


def test_a_broken_off_run_shows_what_was_found(there, monkeypatch):
    there.fill(there.config())

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(remote, "_judge", stop)
    done = run_here("verify", "--remote", there.file())
    assert done.exit_code == 130 and "stopped before the end" in done.stdout


def test_an_object_is_checked_without_a_server():
    name, body = slot_of(1)
    assert check_object(name, memoryview(body)) is None
    wrong = check_object(name.replace("r0of2", "r1of2"), memoryview(body))
    assert wrong is not None and wrong.check == "header"


# -- why ---------------------------------------------------------------------------------------


def test_why_says_how_far_the_remote_store_has_a_prompt(there, path):
    model = described(PLAIN, SOME)
    layer = Layer(path, model)
    put(layer, PROMPT[:32])
    layer.leave()

    def answer(file: Path, code: int = 0) -> dict[str, Any]:
        return answered(path, PROMPT, "--remote", file, code=code)

    assert answered(path, PROMPT)["remote"] is None
    found = answer(there.file())
    assert found["found"]["hit_tokens"] == found["remote"]["hit_tokens"] == 32
    for at, key in enumerate(keys_of(PROMPT, model)[1:5]):
        for rank in range(RANKS if at < 3 else 1):
            obstore.put(there.bucket, object_name(Namespace(SOME, 0), key, rank, RANKS), b"1")
    found = answer(there.file())
    assert (found["found"]["hit_tokens"], found["remote"]) == (32, {"url": there.url, "hit_tokens": 64})
    found = answer(there.file({"aws_secret_access_key": "wrong"}), code=1)
    assert found["remote"]["hit_tokens"] is None and "did not answer" in found["problems"][0]
    shown = run_here("why", path, "--tokens", path.parent / "tokens", "--remote", there.file()).stdout
    assert "64 tokens would hit, with what it has" in " ".join(shown.split())
    assert len(shown.splitlines()) <= 24 and max(map(len, shown.splitlines())) <= 80


def test_why_sees_coded_blocks_as_the_setting_says_or_all_at_an_address_alone(there, s3_server, path, monkeypatch):
    model = described(PLAIN, SOME)
    layer = Layer(path, model)
    put(layer, PROMPT[:32])
    layer.leave()
    for at, key in enumerate(keys_of(PROMPT, model)[1:4]):
        for rank in range(RANKS):
            name = object_name(Namespace(SOME, 0), key, rank, RANKS)
            obstore.put(there.bucket, name + SUFFIX if at == 1 and rank else name, b"1")
    for name, value in s3_server.options.items():
        monkeypatch.setenv(name.upper(), value)

    def hit_tokens(named: object) -> int:
        return answered(path, PROMPT, "--remote", named)["remote"]["hit_tokens"]

    assert hit_tokens(there.file()) == 32
    assert hit_tokens(there.file(remote_codec="zstd-planes")) == 64
    monkeypatch.setitem(CODEC_TYPES, "other", type("Other", (PlanesCodec,), {"suffix": ".other"}))
    for rank in range(RANKS):
        name = object_name(Namespace(SOME, 0), keys_of(PROMPT, model)[4], rank, RANKS)
        obstore.put(there.bucket, f"{name}.other", b"1")
    assert hit_tokens(there.file(remote_codec="zstd-planes")) == 64
    monkeypatch.setitem(sys.modules, "zstandard", None)  # nothing is decoded
    assert hit_tokens(there.url) == 80
