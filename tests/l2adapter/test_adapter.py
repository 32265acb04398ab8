# SPDX-License-Identifier: Apache-2.0
"""``L2Adapter`` made by LMCache's factory, over LMCache's memory objects: bytes, restarts,
identities, tenants, the cap, and what goes wrong."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from lmcache.v1.distributed.internal_api import L1MemoryDesc

from kvdisk.errors import ConfigError
from kvdisk.lmcache import adapter, models, parameters, pieces, versions
from kvdisk.lmcache.prompts import Prompts
from kvdisk.lmcache.tasks import Tasks
from kvdisk.store import Result
from l2adapter.adapters import NAME, Arena, Driver, key_of, parameters_for, write_model

MIB = 1 << 20
SIZES = [8 * MIB, 2 * MIB, 65536, 100_000, 5 * MIB + 12_345, 2 * MIB + 1, 262_144, 900_000]


@pytest.fixture
def driver(tmp_path, model):
    made = Driver(parameters_for(tmp_path / "store", model)).wait_known()
    yield made
    made.close()


# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("align", [4096, 1, 1 << 16])
def test_objects_of_any_size_come_back_after_a_restart(tmp_path, model, align):
    numbers = list(range(len(SIZES)))
    keys = [key_of(at, group=at) for at in numbers]
    for turn in range(2):
        driver = Driver(parameters_for(tmp_path / "store", model), Arena(align=align)).wait_known()
        if turn == 0:
            assert driver.look_up(keys, dict(enumerate(SIZES))) == [False] * len(keys)
            assert driver.store_bytes(keys, SIZES, numbers)
        assert driver.look_up(keys, dict(enumerate(SIZES))) == [True] * len(keys)
        assert driver.load_and_compare(keys, SIZES, numbers) == [True] * len(keys)
        driver.close()


def test_a_second_store_moves_nothing(driver):
    driver.arena.reset()
    keys, objects = [key_of(1)], [driver.arena.make(MIB)]
    assert driver.store(keys, objects).bytes_transferred() == MIB
    assert driver.store(keys, objects) == 0


def test_a_flipped_bit_costs_one_object_and_is_not_found_again(tmp_path, model):
    keys, sizes, numbers = [key_of(at) for at in range(8)], [3 * MIB] * 8, list(range(8))
    driver = Driver(parameters_for(tmp_path / "store", model)).wait_known()
    assert driver.store_bytes(keys, sizes, numbers)
    driver.close()
    flip_a_bit(tmp_path / "store", bytes(adapters_content(3)[2 * MIB + 7000 : 2 * MIB + 7064]))
    driver = Driver(parameters_for(tmp_path / "store", model)).wait_known()
    assert driver.look_up(keys, {0: 3 * MIB}) == [True] * 8
    assert driver.load_and_compare(keys, sizes, numbers) == [at != 3 for at in numbers]
    assert eventually(lambda: driver.look_up(keys, {0: 3 * MIB}) == [at != 3 for at in numbers])
    assert driver.store_bytes([keys[3]], [3 * MIB], [3])
    assert driver.load_and_compare(keys, sizes, numbers) == [True] * 8
    driver.close()


def adapters_content(seed):
    from l2adapter.adapters import content_of

    return content_of(seed, 3 * MIB)


def flip_a_bit(store: Path, wanted: bytes) -> None:
    """Change one bit of these bytes on the drive."""
    for file in (each for each in store.rglob("*") if each.is_file()):
        at = file.read_bytes().find(wanted)
        if at >= 0:
            with file.open("r+b") as opened:
                opened.seek(at)
                opened.write(bytes([wanted[0] ^ 1]))
                os.fsync(opened.fileno())
            return
    raise AssertionError("these bytes are on no drive")


def eventually(is_so, wait_s=20.0):
    until_s = time.monotonic() + wait_s
    while not is_so():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.02)
    return True


def test_what_was_kept_in_part_is_not_found(driver, monkeypatch):
    real = driver.adapter._store.put

    def put_some(blocks, wait_s):
        future = Future()
        real(blocks[1:], wait_s).add_done_callback(lambda ended: future.set_result([Result.NO_ROOM, *ended.result()]))
        return future

    monkeypatch.setattr(driver.adapter._store, "put", put_some)
    assert not driver.store_bytes([key_of(1)], [5 * MIB], [1])
    monkeypatch.undo()
    assert eventually(lambda: driver.look_up([key_of(1)], {0: 5 * MIB}) == [False])
    assert driver.store_bytes([key_of(1)], [5 * MIB], [1])
    assert driver.load_and_compare([key_of(1)], [5 * MIB], [1]) == [True]


def test_objects_follow_each_other_as_they_were_looked_up(driver, monkeypatch):
    real, asked = driver.adapter._store.put, []
    monkeypatch.setattr(
        driver.adapter._store, "put", lambda blocks, wait_s: asked.extend(blocks) or real(blocks, wait_s)
    )
    keys = [key_of(1), key_of(1, group=1), key_of(2), key_of(2, group=1)]
    driver.look_up(keys, {0: 3 * MIB, 1: 3 * MIB})
    assert driver.store_bytes([keys[2], keys[1], keys[0]], [3 * MIB] * 3, [3, 2, 1])
    pieces_each = len(asked) // 3
    third, second, first = (asked[at : at + pieces_each] for at in range(0, len(asked), pieces_each))
    for one in (first, second, third):
        assert [put.parent for put in one[1:]] == [put.key for put in one[:-1]]
    assert first[0].parent is None
    assert second[0].parent is None, "of another group"
    assert third[0].parent == first[-1].key


# -- what is the same object -----------------------------------------------------------------------


def test_other_weights_under_the_same_name_find_nothing(tmp_path):
    keys, numbers = [key_of(at) for at in range(4)], list(range(4))
    first, other = write_model(tmp_path / "model", 1), write_model(tmp_path / "other", 2)
    same = write_model(tmp_path / "moved", 1)
    scaled = write_model(tmp_path / "scaled", 1, rope_scaling={"factor": 2.0})
    found = {}
    for name, source in {
        "first": first,
        "other": other,
        "scaled": scaled,
        "meaning": {"path": str(first), "meaning": {"kv_cache_dtype": "fp8"}},
        "same": same,
    }.items():
        driver = Driver(parameters_for(tmp_path / "store", source)).wait_known()
        if name == "first":
            assert driver.store_bytes(keys, [MIB] * 4, numbers)
        found[name] = sum(driver.look_up(keys, {0: MIB})), sum(driver.load_and_compare(keys, [MIB] * 4, numbers))
        driver.close()
    assert found == {"first": (4, 4), "other": (0, 0), "scaled": (0, 0), "meaning": (0, 0), "same": (4, 4)}


def test_each_part_of_a_key_counts_and_so_does_the_layout(driver):
    assert driver.store_bytes([key_of(1), key_of(1, salt="a")], [MIB, MIB], [1, 2])
    others = [key_of(2), key_of(1, salt="b"), key_of(1, group=1), key_of(1, rank=0x02000200), key_of(1, name="b")]
    assert driver.look_up([key_of(1), *others], {0: MIB, 1: MIB}) == [True, *[False] * 5]
    assert driver.load_and_compare([key_of(1, salt="a"), key_of(1), others[1]], [MIB] * 3, [2, 1, 1])[:2] == [
        True,
        True,
    ]
    assert driver.look_up([key_of(1)], {0: MIB}, torch.float16) == [False], "as many bytes of another type"
    assert driver.look_up([key_of(1)], {0: 2 * MIB}) == [False]
    assert driver.look_up([key_of(1)], {}) == [False], "its layout is not said"


def test_files_that_change_turn_a_model_off(tmp_path, model, monkeypatch, caplog):
    monkeypatch.setattr(models, "LOOK_S", 0.05)
    driver = Driver(parameters_for(tmp_path / "store", model)).wait_known()
    assert driver.store_bytes([key_of(1)], [MIB], [1])
    write_model(model, 2)
    assert eventually(lambda: driver.adapter.report_status()["models"] == {NAME: "off"})
    assert not driver.adapter.report_status()["is_healthy"]
    assert driver.look_up([key_of(1)], {0: MIB}) == [False]
    assert driver.load_and_compare([key_of(1)], [MIB], [1]) == [False]
    assert "files have changed" in caplog.text
    driver.close()


def test_nothing_is_found_or_stored_before_the_weights_are_known(tmp_path, model, monkeypatch):
    real, may_read = models.namespace_of, [False]

    def late(*arguments, **more):
        assert eventually(lambda: may_read[0])
        return real(*arguments, **more)

    monkeypatch.setattr(models, "namespace_of", late)
    driver = Driver(parameters_for(tmp_path / "store", model))
    assert driver.store_bytes([key_of(1)], [MIB], [1])
    may_read[0] = True
    driver.wait_known()
    assert driver.look_up([key_of(1)], {0: MIB}) == [False]
    driver.close()


# -- tenants, deletion, the cap --------------------------------------------------------------------


def test_usage_by_salt_is_within_one_percent_also_after_a_restart(tmp_path, model):
    size = 7 * MIB + 5000
    keys = [key_of(at, salt=salt) for salt, count in (("a", 4), ("b", 2), ("", 3)) for at in range(count)]
    for _ in range(2):
        driver = Driver(parameters_for(tmp_path / "store", model)).wait_known()
        driver.look_up(keys, {0: size})
        if _ == 0:
            assert driver.store_bytes(keys, [size] * 9, list(range(9)))
        usage = driver.adapter.get_usage()
        for salt, count in (("a", 4), ("b", 2), ("", 3)):
            assert usage.bytes_by_cache_salt[salt] == pytest.approx(count * size, rel=0.01)
        assert usage.total_bytes_used == sum(usage.bytes_by_cache_salt.values())
        assert usage.total_capacity_bytes == 256 * MIB
        driver.close()


def test_what_is_deleted_stays_away(tmp_path, model):
    keys = [key_of(at) for at in range(4)]
    driver = Driver(parameters_for(tmp_path / "store", model)).wait_known()
    assert driver.store_bytes(keys, [3 * MIB] * 4, list(range(4)))
    before = driver.adapter.get_usage().total_bytes_used
    driver.adapter.delete([*keys[:2], key_of(99), key_of(1, name="unknown")])
    assert driver.look_up(keys, {0: 3 * MIB}) == [False, False, True, True]
    assert driver.adapter.get_usage().total_bytes_used == before // 2, "all pieces have gone"
    driver.close()
    driver = Driver(parameters_for(tmp_path / "store", model)).wait_known()
    assert driver.look_up(keys, {0: 3 * MIB}) == [False, False, True, True]
    driver.close()


def test_the_cap_holds_with_two_sizes(tmp_path, model):
    cap = 64 * MIB
    driver = Driver(parameters_for(tmp_path / "store", model, cap)).wait_known()
    most = 0
    for turn in range(24):
        keys = [key_of(2 * turn), key_of(2 * turn + 1, group=1)]
        driver.look_up(keys, {0: 6 * MIB, 1: 300_000})
        driver.store_bytes(keys, [6 * MIB, 300_000], [2 * turn, 2 * turn + 1])
        most = max(most, allocated_in(tmp_path / "store"))
    assert cap // 2 < most <= cap
    keys = [key_of(2 * turn) for turn in range(24)]
    found = driver.look_up(keys, {0: 6 * MIB})
    some = [key for key, is_there in zip(keys, found, strict=True) if is_there]
    assert 3 < len(some) < 12
    seeds = [2 * turn for turn in range(24) if found[turn]]
    assert all(driver.load_and_compare(some, [6 * MIB] * len(some), seeds)), "what was found was held"
    driver.close()


def test_what_was_found_is_held(tmp_path, model):
    driver = Driver(parameters_for(tmp_path / "store", model, 64 * MIB)).wait_known()
    assert driver.store_bytes([key_of(0)], [6 * MIB], [0])
    assert driver.look_up([key_of(0)], {0: 6 * MIB}) == [True]
    for number in range(1, 25):
        for _ in range(3):  # asked for more often than the first one
            driver.look_up([key_of(number)], {0: 6 * MIB})
        driver.store_bytes([key_of(number)], [6 * MIB], [number])
    assert driver.load_and_compare([key_of(0)], [6 * MIB], [0]) == [True]
    driver.close()


def allocated_in(folder: Path) -> int:
    return sum(each.stat().st_blocks * 512 for each in folder.rglob("*") if each.is_file())


def test_a_second_server_of_the_host_finds_what_the_first_has(tmp_path, model):
    keys, numbers = [key_of(at) for at in range(4)], list(range(4))
    first = Driver(parameters_for(tmp_path / "store", model)).wait_known()
    second = Driver(parameters_for(tmp_path / "store", model, lookup_wait_s=20.0)).wait_known()
    assert first.store_bytes(keys, [3 * MIB] * 4, numbers)
    assert eventually(lambda: second.look_up([*keys, key_of(9)], {0: 3 * MIB}) == [True] * 4 + [False])
    assert second.load_and_compare(keys, [3 * MIB] * 4, numbers) == [True] * 4
    second.close()
    first.close()


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_closed_store_ends_every_task(driver):
    driver.adapter._store.close()
    assert not driver.store_bytes([key_of(1)], [MIB], [1])
    assert driver.look_up([key_of(1)], {0: MIB}) == [False]
    assert driver.load_and_compare([key_of(1)], [MIB], [1]) == [False]
    driver.adapter.delete([key_of(1)])
    assert driver.adapter.get_usage().total_bytes_used == 0
    assert not driver.adapter.report_status()["is_healthy"]


def test_an_error_of_ours_ends_a_task_and_is_told(driver, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(driver.adapter, "_name_of", fail)
    assert not driver.store_bytes([key_of(1)], [MIB], [1])
    assert driver.look_up([key_of(1)], {0: MIB}) == [False]
    assert driver.load_and_compare([key_of(1)], [MIB], [1]) == [False]
    driver.adapter.delete([key_of(1)])
    assert "LMCache goes on without it" in caplog.text


def test_a_listener_that_fails_ends_the_task_all_the_same(driver):
    class Listener:
        def on_l2_keys_stored(self, *_):
            raise RuntimeError("not ours")

        on_l2_keys_accessed = on_l2_keys_deleted = on_l2_keys_stored

    driver.adapter.register_listener(Listener())
    assert not driver.store_bytes([key_of(1)], [MIB], [1])
    assert driver.look_up([key_of(1)], {0: MIB}) == [True]
    assert driver.load_and_compare([key_of(1)], [MIB], [1]) == [False]
    driver.adapter.delete([key_of(1)])
    assert driver.look_up([key_of(1)], {0: MIB}) == [False]


def test_what_cannot_be_kept_is_told_and_is_no_failure(driver, caplog):
    driver.arena.reset()
    small, packed = driver.arena.make(1000), driver.arena.make(MIB)
    packed.set_used_size(1234)
    elsewhere = Arena(MIB).make(MIB)
    short = type(key_of(1))(b"12345678", NAME, 0)
    keys = [key_of(1), key_of(2), key_of(3), key_of(4, name="another"), short]
    result = driver.store(keys, [small, packed, elsewhere, driver.arena.make(MIB), driver.arena.make(MIB)])
    assert result == 0
    for told in ("too small", "by a serde", "outside of", "name it in", "--hash-algorithm blake3"):
        assert told in caplog.text
    assert driver.adapter.get_usage().total_bytes_used == 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"models": None}, 'needs {"models"'),
        ({"models": {}}, 'needs {"models"'),
        ({"models": {NAME: 3}}, "is a path, or an object with one"),
        ({"models": {NAME: {}}}, 'needs a "path", or a "weights_name"'),
        ({"models": {NAME: {"path": "a", "weights_name": "b"}}}, 'needs a "path", or a "weights_name"'),
        ({"models": {NAME: {"weights_name": "b", "revision": "c"}}}, "revision of no path"),
        ({"models": {NAME: {"pth": "a"}}}, "has no 'pth'"),
        ({"models": {NAME: {"path": ""}}}, "is named by text"),
        ({"models": {NAME: {"weights_name": "b", "meaning": 3}}}, "is an object"),
        ({"models": {NAME: "/no/such/place"}}, "neither a directory nor in the hub's cache"),
        ({"kvdisk": None}, 'needs {"kvdisk"'),
        ({"kvdisk": {"store_dirs": "/nvme/kv", "nvme_byts": 3}}, "nvme_byts"),
        ({"kvdsk": {}}, "has no 'kvdsk'"),
    ],
)
def test_a_wrong_parameter_is_one_sentence(tmp_path, model, change, told):
    with pytest.raises(ConfigError) as raised:
        Driver(parameters_for(tmp_path / "store", model) | change)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": {"type": "longrope"}},
        {"text_config": {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}},
        {"text_config": {"model_type": "llama4_text"}},
    ],
)
def test_a_model_of_the_longest_context_needs_it(tmp_path, config):
    model = write_model(tmp_path / "model", **config)
    with pytest.raises(ConfigError, match='"max_model_len" in the model\'s "meaning"'):
        Driver(parameters_for(tmp_path / "store", model))
    longest = {"path": str(model), "meaning": {"max_model_len": 4096}}
    Driver(parameters_for(tmp_path / "store", longest)).close()
    plain = write_model(tmp_path / "plain", quantization_config={"activation_scheme": "dynamic"})
    Driver(parameters_for(tmp_path / "store", plain)).close()


def test_no_memory_and_another_version_are_refused(tmp_path, model, monkeypatch):
    with pytest.raises(ConfigError, match="first level in host memory"):
        adapter.L2Adapter(parameters_for(tmp_path / "store", model))
    with pytest.raises(ConfigError, match="than one piece"):
        adapter.L2Adapter(parameters_for(tmp_path / "store", model), L1MemoryDesc(4096, 4096, 4096))
    monkeypatch.setattr("lmcache._version.__version__", "0.6.0")
    with pytest.raises(ConfigError, match=r"0\.5\.5 and 0\.5\.6, and this is 0\.6\.0\."):
        versions.lmcache_version()


def test_a_model_that_is_refused_leaves_the_store_free(tmp_path, model):
    with pytest.raises(ConfigError):
        Driver(parameters_for(tmp_path / "store", "/no/such/place"))
    Driver(parameters_for(tmp_path / "store", model)).close()


# -- parts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [65536, 65537, 131072, 1 << 20, 2 << 20, (2 << 20) + 4096, 12_345_678])
@pytest.mark.parametrize("pitch", [1, 512, 4096])
def test_pieces_cover_an_object_and_nothing_else(size, pitch):
    layout = pieces.layout_of([(size,)], [torch.uint8], pitch)
    covered = bytearray(layout.taken_bytes)
    for key, piece in zip(layout.keys(b"n" * 32), layout.pieces, strict=True):
        length = pieces.KINDS[int.from_bytes(key[-2:], "big")].payload_bytes
        assert piece.offset % pitch == 0
        assert piece.offset + length <= layout.taken_bytes
        covered[piece.offset : piece.offset + length] = b"x" * length
    assert covered == b"x" * layout.taken_bytes
    assert size <= layout.taken_bytes < size + pitch
    assert len(set(layout.keys(b"n" * 32))) == len(layout.pieces)


def test_prompts_remember_the_last():
    prompts = Prompts(most=3)
    prompts.note(["a", "b", "c"])
    assert [prompts.before(key) for key in "abcd"] == [None, "a", "b", None]
    prompts.note(["a", "d"])
    assert [prompts.before(key) for key in "abcd"] == [None, None, "b", "a"]


def test_a_task_that_ends_between_two_questions_wakes_again():
    tasks = Tasks()
    first, second = tasks.begin(), tasks.begin()
    tasks.end(first, "one")
    assert os.eventfd_read(tasks.fileno()) == 1
    tasks.end(second, "two")
    assert tasks.take(first) == "one"
    assert os.eventfd_read(tasks.fileno()) == 1, "LMCache asks for the second one only when it wakes"
    assert tasks.take(second) == "two"
    assert tasks.take(second) is None
    tasks.close()
    tasks.end(first, "late")
    assert tasks.take_all() == {}


def test_parameters_are_kept_as_they_were_written(tmp_path):
    written = {"path": "org/name", "revision": "abc", "meaning": {"kv": "fp8"}}
    found = parameters.parse_parameters(json.loads(json.dumps(parameters_for(tmp_path, written))))
    assert found.sources[NAME] == ("org/name", "abc", None, {"kv": "fp8"})
    assert found.config.lookup_wait_s == parameters.LOOKUP_WAIT_S
