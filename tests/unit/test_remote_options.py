# SPDX-License-Identifier: Apache-2.0
"""Every setting that obstore's stores and their HTTP client have, as ``remote_options``: it reaches
the right one of them, or is refused in a sentence that names it."""

from __future__ import annotations

import re
from pathlib import Path

import certifi
import obstore
import pytest

from kvdisk.errors import ConfigError
from kvdisk.remote.obstore_bucket import CLIENT_OPTIONS, ObstoreBucket, divide_options

STORES = {"s3": ("_aws", "S3Config"), "gs": ("_gcs", "GCSConfig"), "az": ("_azure", "AzureConfig")}
PREFIXES = {"s3": "aws_", "gs": "google_", "az": "azure_"}
BASE = {"s3": {}, "gs": {}, "az": {"azure_storage_account_name": "somebody"}}
VALUES = ("", "text", "5s", "1", "true")
"""What takes the first two is text, and takes all."""


def names_of(file: str, config: str) -> list[str]:
    """Return the keys of one of obstore's typed configurations, which is not there at run time."""
    text = (Path(obstore.__file__).parent / "_store" / f"{file}.pyi").read_text()
    body = text.partition(f"class {config}(")[2].partition("\nclass ")[0]
    return re.findall(r"^    ([a-z_0-9]+): ", body, re.MULTILINE)


CLIENT = names_of("_client", "ClientConfig")


def test_all_settings_of_the_client_are_known():
    assert set(CLIENT) == CLIENT_OPTIONS | {"default_headers"}
    assert len(CLIENT) > 15 and all(len(names_of(*of)) > 5 for of in STORES.values())


@pytest.fixture
def one_root(tmp_path, monkeypatch):
    """One root certificate for all that there are: each client reads them."""
    one, end, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----\n")
    (tmp_path / "root.pem").write_text(one + end)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "root.pem"))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))


@pytest.mark.usefixtures("one_root")
@pytest.mark.parametrize("scheme", STORES)
def test_each_setting_is_taken_or_refused_by_name(scheme, capfd):
    url, prefix = f"{scheme}://bucket/kv", PREFIXES[scheme]
    taken = set()
    for bare in [*names_of(*STORES[scheme]), *CLIENT]:
        good: list[str] = []
        for name in (bare, prefix + bare, (prefix + bare).upper()):
            # A client is slow to make: of the other forms one that is right, and one that is not.
            for value in VALUES if name == bare else (*good[:1], *[each for each in VALUES if each not in good][:1]):
                if name == bare and good == ["", "text"]:
                    break
                try:
                    ObstoreBucket(url, BASE[scheme] | {name: value}, deadline_s=1.0)
                    taken.add(name)
                    good.append(value)
                except ConfigError as error:
                    said = str(error)
                    assert "\n" not in said and said.endswith(".")
                    bare_words = name.lower().removeprefix(prefix).removeprefix("aws_")
                    assert bare_words in said.lower() or name in said, said
    assert "panicked" not in capfd.readouterr().err
    assert {*CLIENT_OPTIONS} - {"root_certificate"} <= taken
    assert {prefix + name for name in CLIENT_OPTIONS} - {f"{prefix}root_certificate"} <= taken


def test_what_is_of_the_client_does_not_reach_the_store():
    options = {"aws_allow_http": "true", "timeout": "5s", "aws_region": "us-east-1", "AWS_PROXY_URL": "http://proxy"}
    client = {"allow_http": "true", "timeout": "5s", "proxy_url": "http://proxy"}
    assert divide_options("s3://bucket", options) == ({"aws_region": "us-east-1"}, client)


def test_of_several_settings_the_wrong_one_is_named():
    with pytest.raises(ConfigError, match=r"cannot be used: remote_options 'http1_only': .* boolean\.$"):
        ObstoreBucket(
            "s3://bucket", {"aws_region": "us-east-1", "http1_only": "maybe", "timeout": "5s"}, deadline_s=1.0
        )
