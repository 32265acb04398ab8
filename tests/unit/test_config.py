# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from kvdisk.config import CODECS, Config, parse_bytes
from kvdisk.errors import ConfigError

STORE = {"store_dirs": "/nvme/kv", "nvme_bytes": "1GiB"}
REMOTE = {"remote": "s3://bucket/prefix"}


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("store_dirs", "/nvme/kv", (Path("/nvme/kv"),)),
        ("store_dirs", ["/nvme1/kv", Path("/nvme0/kv")], (Path("/nvme1/kv"), Path("/nvme0/kv"))),
        ("cpu_bytes", "1.5GB", 1_500_000_000),
        ("nvme_admission", "reuse(2)", "reuse(2)"),
        ("cpu_admission", "my.own:Policy", "my.own:Policy"),
        ("nvme_write_bytes_per_day", "2TB", 2 * 10**12),
        ("min_load_tokens", "auto", None),
        ("min_load_tokens", 0, 0),
        ("unit_tokens", "auto", "auto"),
        ("unit_tokens", "off", "off"),
        ("unit_tokens", 64, 64),
        ("unit_tokens", "64", 64),
        ("store_decode", True, True),
        ("remote", "s3://bucket", "s3://bucket"),
        ("remote_options", {}, ()),
        ("eviction", None, "learned"),
    ],
)
def test_values_are_read(key, value, read):
    assert getattr(Config.from_mapping(STORE | {key: value}), key) == read


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (7, 7), ("7", 7), ("2k", 2000), ("2KiB", 2048), ("1.5 MiB", 3 << 19), ("3TiB", 3 << 40), ("4b", 4),
        ("500Gi", 500 << 30), ("500G", 500 * 10**9), ("500GB", 500 * 10**9), ("500GiB", 500 << 30), ("2M", 2 * 10**6),
        ("64Ki", 64 << 10), ("2Pi", 2 << 50), ("1.2PB", 12 * 10**14),
    ],
)  # fmt: skip
def test_sizes(text, size):
    assert parse_bytes("x", text) == size


@pytest.mark.parametrize("wrong", [-1, "5 apples", "500m", "1i", "", None, True, 1.5, "GiB", "9" * 400])
def test_wrong_sizes(wrong):
    with pytest.raises(ConfigError, match="cpu_bytes must be a size"):
        parse_bytes("cpu_bytes", wrong)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"stor_dirs": "/x"}, "'stor_dirs'; the nearest it knows is 'store_dirs'.$"),
        ({"CPU_BYTES": "1G"}, "'CPU_BYTES'; the nearest it knows is 'cpu_bytes'.$"),
        ({"directory": "/x"}, "the setting 'directory'.$"),
        ({1: "/x"}, "the setting 1.$"),
        ({"store_dirs": "/x"}, "needs nvme_bytes"),
        ({"nvme_bytes": 1}, "needs store_dirs"),
        ({"cpu_bytes": 0}, "no tier"),
        ({"remote": "bucket/prefix"}, "begins with s3://, gs://, az:// or mooncake://"),
        ({"remote": "http://bucket"}, "begins with"),
        ({"remote": "s3://"}, "begins with"),
        ({"remote_read_only": True}, "remote_read_only needs remote"),
        ({"remote_options": {"aws_region": "x"}}, "remote_options needs remote"),
        ({"remote_key_file": "/key"}, "remote_key_file needs remote"),
        ({"remote_codec": "zstd-planes"}, "remote_codec needs remote"),
        (REMOTE | {"remote_codec": "gzip"}, f"one of {', '.join(map(repr, CODECS))}, not 'gzip'"),
        (REMOTE | {"remote_options": {"aws_region": 1}}, "text by name"),
        (REMOTE | {"remote_options": "aws_region"}, "text by name"),
        (REMOTE | {"remote_admission": "learned"}, "'all' or 'reuse\\(n\\)'"),
        (REMOTE | {"remote_admission": "reuse(17)"}, "from 1 to 16"),
        (REMOTE | {"remote_deadline_s": 0}, "more than 0"),
        (REMOTE | {"cpu_bytes": 0}, "no tier"),
        (STORE | {"store_dirs": "relative"}, "absolute"),
        (STORE | {"store_dirs": ["/a", "/b", "/a"]}, "'/a' twice"),
        (STORE | {"store_dirs": ["/a", "b"]}, "absolute"),
        (STORE | {"store_dirs": []}, "a directory"),
        ({"store_policy": "sometimes"}, "'on_preemption', 'spillover', or a class"),
        ({"store_policy": "no_class:"}, "'module:Class'"),
        ({"eviction": "arc"}, "'lru'"),
        ({"device": "uring"}, "'posix', 'gds'"),
        ({"nvme_admission": "reuse(0)"}, "reuse"),
        ({"cpu_admission": "reuse(17)"}, "from 1 to 16"),
        ({"nvme_admission": "adaptive"}, "'learned'"),
        ({"nvme_admission": "my policies:Own"}, "'module:Class'"),
        ({"nvme_admission": 2}, "'module:Class'"),
        ({"nvme_write_bytes_per_day": "1TB"}, "needs store_dirs"),
        (STORE | {"nvme_write_bytes_per_day": "much"}, "must be a size"),
        ({"store_decode": 1}, "true or false"),
        ({"lookup_wait_s": float("inf")}, "seconds"),
        ({"index_commit_s": 1e10}, "fewer than 2..31"),
        ({"io_deadline_s": -1}, "seconds"),
        ({"min_load_tokens": -1}, "whole number"),
        ({"unit_tokens": 0}, "'auto', 'off' or a number of tokens"),
        ({"unit_tokens": "some"}, "'auto', 'off' or a number of tokens"),
        ({"min_load_tokens": "many"}, "'auto' or a whole number"),
        ({"prefetch": "yes"}, "true or false"),
        ({"on_reset": "panic"}, "'keep'"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(values, said):
    with pytest.raises(ConfigError, match=said) as error:
        Config.from_mapping(values)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"aws_secret_access_key": "hidden", "aws_allow_http": True}, "not a bool as that of 'aws_allow_http'.$"),
        ({"aws_secret_access_key": ["hidden"]}, "not a list as that of 'aws_secret_access_key'.$"),
        ('{"aws_secret_access_key": "hidden",}', "not a str.$"),
    ],
)
def test_no_secret_is_shown_that_is_given_wrongly(options, said):
    with pytest.raises(ConfigError, match=said) as error:
        Config.from_mapping(REMOTE | {"remote_options": options})
    assert "hidden" not in str(error.value)
