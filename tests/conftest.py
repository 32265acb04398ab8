# SPDX-License-Identifier: Apache-2.0
"""What all tests share: how Hypothesis searches, servers that are slow to start, and what the
machine may lack."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings
from support.mooncake_store import MooncakeStore
from support.needs import need, pytest_terminal_summary, why_no_mooncake, why_no_queue, why_not_compiled
from support.s3_server import S3Server
from support.units_of_work import pytest_addoption, pytest_collection_modifyitems, pytest_xdist_make_scheduler

# pytest looks for these here
__all__ = [
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_terminal_summary",
    "pytest_xdist_make_scheduler",
]

# No deadline: two shared cores make no promise. Where every change is tested, the same examples
# each time, so that a change is judged by what it changed; elsewhere new ones, and a failure prints
# how to repeat it.
settings.register_profile("kvdisk", deadline=None, print_blob=True, derandomize=os.environ.get("CI") == "true")
settings.load_profile("kvdisk")

# A shell lets what runs in the background ignore SIGINT, and so would each process of a test.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Threads of torch's that wait for each other take from the two cores that other workers need.
os.environ.setdefault("OMP_NUM_THREADS", "1")

gc.disable()  # while tests are collected: most of what is made then stays


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """From here on no collection walks what has been imported."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # a tenth of the simulation was collections that found nothing
    gc.enable()
    gc.unfreeze = lambda: None  # vLLM's cleanup and the replay call it, and each collection took half a second


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory) -> Iterator[S3Server]:
    """A real S3 server. A test that stops or kills it has it run again when it ends."""
    server = S3Server(tmp_path_factory.mktemp("s3"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def mooncake_store(tmp_path_factory) -> Iterator[MooncakeStore]:
    """A real Mooncake Store. A test that stops or kills a part of it has it run again when it
    ends."""
    need(why_no_mooncake())
    store = MooncakeStore(tmp_path_factory.mktemp("mooncake"))
    store.start()
    yield store
    store.kill()


@pytest.fixture(scope="session")
def needs_queue() -> None:
    """Skips the test where kvdisk has threads move blocks, since there is no queue of the
    kernel's."""
    need(why_no_queue())


@pytest.fixture(scope="session")
def needs_compiler() -> None:
    """Skips the test where kvdisk was installed without a compiler."""
    need(why_not_compiled())
