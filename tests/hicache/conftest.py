# SPDX-License-Identifier: Apache-2.0
"""Tests over SGLang's package: collected where it is on PYTHONPATH, as ``make test-engines`` has
it."""

from __future__ import annotations

import pytest

from hicache import HAS_SGLANG

collect_ignore_glob = [] if HAS_SGLANG else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _prepared() -> None:
    """Have SGLang compile how it hashes tokens, which takes a while once: a thread of its
    controller would do it in the first lookup."""
    if HAS_SGLANG:
        from sglang.srt.mem_cache.utils import get_hash_str

        from hicache.backends import be_patient

        be_patient()

        assert len(get_hash_str(list(range(16)), None, page_size=16)) == 1


@pytest.fixture
def model(tmp_path):
    from hicache.backends import write_model

    return write_model(tmp_path / "model")
