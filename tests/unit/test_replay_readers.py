# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gzip
import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdisk.cli.replay.trace import BYTES_FOR_TOKENS, NO_IDENTITY, Form, TraceError, read_trace

MOONCAKE = [
    {"timestamp": 0, "input_length": 1500, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 27000, "input_length": 1536, "output_length": 3, "hash_ids": [0, 1, 3]},
]
OWN = {"kvdisk_trace": 1, "block_tokens": 16, "block_bytes": 5}
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.9799600,4808,10\n"
    "2023-11-16 18:17:05.0300000,15,7\n"
    "2024-05-10 00:00:00.009930+00:00,2162,5\n"
)


def lines(*objects):
    return "".join(f"{json.dumps(one)}\n" for one in objects)


def read(tmp_path, text, **options):
    path = tmp_path / "trace"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_trace(path, **options)


def test_mooncake(tmp_path):
    text = lines(*MOONCAKE)
    trace = read(tmp_path, text)
    assert (trace.form, trace.block_tokens, trace.tokens) == ("mooncake", 512, 3036)
    assert (trace.references, trace.distinct, trace.longest) == (6, 4, 3)
    first, second = trace.requests
    assert first.hashes[:2] == second.hashes[:2] and first.hashes[2] != second.hashes[2]
    assert (first.time_s, second.time_s, first.tokens, first.output_tokens) == (0.0, 27.0, 1500, 5)
    assert trace.token_span(first, 0, 2) == 1024 and trace.token_span(first, 2, 3) == 1500 - 1024
    for same in (gzip.compress(text.encode()), f"\n{text}\n\n", f"\ufeff{text}"):
        assert read(tmp_path, same).requests == trace.requests
    assert read(tmp_path, text + "damaged", limit=2).requests == trace.requests
    whole = read(tmp_path, text, whole=True).requests
    assert [(len(request.hashes), request.tokens) for request in whole] == [(2, 1024), (3, 1536)]


def test_a_trace_in_units(tmp_path):
    """A unit has the name of its last block; what is behind the last whole one never hits."""
    path = tmp_path / "trace"
    path.write_text('{"blocks": [1, 2, 3, 4, 5], "prompt_tokens": 75}\n{"blocks": [1, 2, 3, 9], "prompt_tokens": 64}\n')
    trace = read_trace(path)
    units = trace.in_units(32)
    assert [request.hashes for request in units.requests] == [request.hashes[1::2] for request in trace.requests]
    assert (units.tokens, trace.most_hits, units.most_hits) == (trace.tokens, 48, 32)
    assert trace.in_units(None) is trace and trace.in_units(16).requests == trace.requests
    for tokens, why in ((24, "not of whole blocks of 16"), (128, "has no request with a unit of 128 tokens")):
        with pytest.raises(TraceError, match=why):
            trace.in_units(tokens)


def test_azure_shares_no_block(tmp_path):
    trace = read(tmp_path, AZURE)
    assert (trace.form, trace.block_tokens, trace.notes) == ("azure", 16, (NO_IDENTITY,))
    assert [len(request.hashes) for request in trace.requests] == [300, 0, 135]
    assert trace.distinct == trace.references == 435
    first, second, third = trace.requests
    assert second.time_s - first.time_s == pytest.approx(1.05004)
    assert third.time_s == 1715299200.00993
    assert (first.tokens, first.output_tokens, second.tokens) == (4800, 10, 0)


def test_generic(tmp_path):
    named = {"time_s": 1.5, "blocks": ["a", 7], "output_tokens": 3}
    trace = read(tmp_path, lines(named, {"blocks": ["a", "7"], "prompt_tokens": 17}, {"blocks": ["b", 7]}))
    first, second, third = trace.requests
    assert (trace.form, first.time_s, first.tokens, second.tokens, first.output_tokens) == ("jsonl", 1.5, 32, 17, 3)
    assert first.hashes[0] == second.hashes[0]
    assert len({*first.hashes, *second.hashes, *third.hashes}) == 5, "behind another block it is another block"
    tokens = [{"tokens": list(range(40))}, {"tokens": list(range(32))}]
    trace = read(tmp_path, lines(*tokens, {"prompt": "x" * 64 * 2}, {"prompt": "y" * 63}))
    assert [len(request.hashes) for request in trace.requests] == [2, 2, 2, 0], "full blocks only"
    assert trace.requests[0].hashes == trace.requests[1].hashes and trace.notes == (BYTES_FOR_TOKENS,)
    assert read(tmp_path, lines({"tokens": [1] * 40}), block_tokens=20).references == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is empty"),
        ("hello\n", r"line 1: neither a JSON object nor a header"),
        (lines(MOONCAKE[0]) + '{"timestamp": 1, "input_le', r"line 2: not a JSON object; it may be cut short"),
        (lines(MOONCAKE[0] | {"input_length": 5}), r"line 1: 3 blocks of 512 tokens cannot be a prompt of 5"),
        (lines(MOONCAKE[0] | {"input_length": -1}), r"line 1: input_length must be a whole number of tokens, not -1"),
        (lines(MOONCAKE[0] | {"timestamp": "soon"}), r"line 1: timestamp must be a number, not 'soon'"),
        (lines(MOONCAKE[0] | {"hash_ids": [0, -1, 2]}), "line 1: hash_ids must be a list"),
        (lines(MOONCAKE[0] | {"hash_ids": [], "input_length": 0}), "has no request with a block of 512 tokens"),
        (lines({"blocks": [1], "prompt": "x"}), "not blocks and prompt"),
        (lines({"blocks": ["\ud800"]}), "line 1: blocks must be a list"),
        (lines({"prompt": 7}), "line 1: prompt must be text"),
        (AZURE + "yesterday,1,1\n", "line 5: TIMESTAMP must be a date and a time, not 'yesterday'"),
        (AZURE + "2024-05-10 00:00:00,12\n", "line 5: GeneratedTokens must be a whole number of tokens, not missing"),
        (AZURE + '2024-05-10 00:00:00,"12,1\n', "line 5: not a line of CSV"),
        (b"\xff\xfe\x00", "line 1: not text in UTF-8"),
        (gzip.compress(b"x" * 1000, mtime=0)[:-20], "damaged gzip file"),
        (lines(OWN | {"kvdisk_trace": 2}, {}), "line 2: not the first line of a trace of kvdisk 1"),
        (lines(OWN | {"block_tokens": 0}, {}), "line 2: not the first line of a trace"),
        (lines({"kvdisk_trace": 1, "block_tokens": 16}), "line 1: block_bytes must be a number"),
        (lines(OWN), "has no request yet"),
        (lines(OWN) + '{"time_s": 1, "blo', "line 2: not a JSON object"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence_that_names_the_line(tmp_path, text, why):
    with pytest.raises(TraceError, match=why) as caught:
        read(tmp_path, text)
    said = str(caught.value)
    assert said.startswith(str(tmp_path)) and "\n" not in said


def test_files_and_forms_that_cannot_be_read(tmp_path):
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)
    with pytest.raises(TraceError, match="line 1: not a JSON object"):
        read(tmp_path, AZURE, form=Form.JSONL)


WHOLE = (lines(*MOONCAKE).encode(), AZURE.encode(), lines({"blocks": [1, 2]}, {"tokens": [1]}).encode())


@given(
    st.sampled_from(WHOLE),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=6),
    st.integers(1, 400),
    st.booleans(),
)
def test_damage_is_a_sentence_or_harmless_never_anything_else(tmp_path_factory, whole, changes, kept, packed):
    data = bytearray(whole)
    for at, value in changes:
        if at < len(data):
            data[at] = value
    raw = bytes(data[:kept])
    path = tmp_path_factory.mktemp("fuzz") / "trace"
    path.write_bytes(gzip.compress(raw) if packed else raw)
    with suppress(TraceError):
        trace = read_trace(path)
        assert trace.references > 0
        for request in trace.requests:
            blocks = len(request.hashes)
            assert (blocks - 1) * trace.block_tokens < request.tokens <= blocks * trace.block_tokens or not blocks
