# SPDX-License-Identifier: Apache-2.0
"""kvdisk in LMCache's real server process: what engines find after it was killed, after a bit was
flipped, and with other weights."""

from __future__ import annotations

import subprocess

import pytest
import torch

from l2adapter.adapters import NAME, option_for, parameters_for, write_model
from l2adapter.servers import ODD_SHAPE, SHAPE, Engine, Server, command, environment
from l2adapter.test_adapter import allocated_in, flip_a_bit

OTHER = "another-model"
MIB = 1 << 20


@pytest.fixture
def servers(tmp_path):
    """Return what starts a server; in the end all are killed."""
    started = []

    def start(parameters, *more):
        started.append(Server(parameters, tmp_path, *more))
        return started[-1]

    yield start
    for server in started:
        server.kill()


def load_all(server, name, shape, prompts):
    engine = Engine(server, name, shape)
    try:
        return sum(engine.load(number) for number in prompts)
    finally:
        engine.close()


def compute_all(server, name, shape, prompts, salt=""):
    engine = Engine(server, name, shape, salt)
    for number in prompts:
        engine.compute(number)
    engine.close()


def test_a_killed_server_loses_nothing_that_was_committed(tmp_path, model, servers):
    """With two models, whose objects have two sizes."""
    parameters = parameters_for(tmp_path / "store", model)
    parameters["models"][OTHER] = str(write_model(tmp_path / "other", 2))
    server = servers(parameters)
    compute_all(server, NAME, SHAPE, range(4))
    compute_all(server, OTHER, ODD_SHAPE, range(4))
    server.wait_committed()
    server.kill()
    server = servers(parameters)
    assert load_all(server, OTHER, ODD_SHAPE, range(4)) == 16
    assert load_all(server, NAME, SHAPE, range(4)) == 16
    assert server.kvdisk["is_healthy"]
    said = "".join(line for line in server.log.splitlines() if "kvdisk" in line)
    assert f"INFO:\x1b[0m kvdisk knows the weights of {NAME}." in said, "its lines are among LMCache's"
    assert "WARNING" not in said
    server.stop()


def test_a_flipped_bit_is_not_served_and_other_weights_find_nothing(tmp_path, model, servers):
    parameters = parameters_for(tmp_path / "store", model)
    server = servers(parameters)
    compute_all(server, NAME, SHAPE, [7])
    server.wait_committed()
    server.stop()
    flip_the_third_chunk(tmp_path / "store")
    server = servers(parameters)
    assert load_all(server, NAME, SHAPE, [7]) == 2, "the prefix before the flipped bit"
    server.stop()
    write_model(model, 2)
    server = servers(parameters)
    assert load_all(server, NAME, SHAPE, [7]) == 0
    server.stop()


def flip_the_third_chunk(store):
    """Change a bit of the KV of the third chunk of prompt 7, in the last layer."""
    engine = object.__new__(Engine)
    engine._name = NAME
    kv = engine._kv(7, 3, torch.empty((2, 64, 16, 8, 128), dtype=torch.float16))
    row = kv[1, 2 * 16 + 5].contiguous().view(torch.uint8).numpy().tobytes()
    flip_a_bit(store, row[:64])


def test_usage_by_tenant_is_on_the_quota_page(tmp_path, model, servers):
    server = servers(parameters_for(tmp_path / "store", model))
    compute_all(server, NAME, SHAPE, range(3), salt="tenant-a")
    compute_all(server, NAME, SHAPE, range(1), salt="tenant-b")
    server.wait_committed()
    for salt, prompts in (("tenant-a", 3), ("tenant-b", 1)):
        assert used_by(server, salt) == pytest.approx(prompts * 16 * MIB, rel=0.01)
    assert load_all(server, NAME, SHAPE, range(3)) == 0, "of no tenant"
    server.stop()


def used_by(server, salt):
    return server.get(f"/quota/{salt}")["current_usage_gb"] * (1 << 30)


def test_the_cap_holds_in_the_server(tmp_path, model, servers):
    cap = 96 * MIB
    server = servers(parameters_for(tmp_path / "store", model, cap))
    engine, most = Engine(server, NAME, SHAPE), 0
    for number in range(10):
        engine.compute(number)
        server.wait_committed()
        most = max(most, allocated_in(tmp_path / "store"))
    engine.close()
    assert cap // 2 < most <= cap
    server.stop()


def test_wrong_parameters_stop_the_start_with_one_sentence(tmp_path, servers):
    with pytest.raises(RuntimeError) as raised:
        servers({"kvdisk": {"store_dirs": str(tmp_path / "store"), "nvme_bytes": "1GiB"}})
    assert 'kvdisk: adapter_params needs {"models": {"NAME": "PATH"}}' in str(raised.value)


@pytest.mark.parametrize("more", [("--data-size-kb", "2500", "--l1-align-bytes", "4096"), ("--data-size-kb", "100")])
def test_lmcaches_own_acceptance_is_verified(tmp_path, more):
    parameters = parameters_for(tmp_path / "store", {"weights_name": "no weights"})
    parameters["models"] = {"bench-model": parameters["models"][NAME]}
    arguments = ("--num-keys", "8", "--in-flight", "2", "--rounds", "2", *more, "--l2-adapter", option_for(parameters))
    done = subprocess.run(
        command("bench", "l2", "--no-skip-verify", *arguments),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 16 keys data verified OK." in done.stdout
