# SPDX-License-Identifier: Apache-2.0
"""The dashboard for Grafana: that it asks for metrics that there are, as they are. The page:
``test_docs``."""

from __future__ import annotations

import json
import re
from pathlib import Path

from kvdisk.stats import METRICS, Kind

ROOT = Path(__file__).resolve().parents[2]
BOARD = json.loads((ROOT / "docs/grafana/kvdisk.json").read_text())
VISIBLE = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
PANELS = [*VISIBLE, *(panel for row in BOARD["panels"] for panel in row.get("panels", ()))]
LEFT_OUT = {
    "held_blocks": "used_bytes says the same",
    "budget_pauses": "write_budget_bytes shows them",
    "moved_segments": "evicted_blocks shows what it costs",
    "remote_paused": "remote_questions stop rising",
    "lost_events": "of interest to those who listen to events only",
}
SUFFIXES = {Kind.COUNTER: ("_total",), Kind.GAUGE: ("",), Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}
NAMES = {f"{metric.name}{suffix}": metric for metric in METRICS.values() for suffix in SUFFIXES[metric.kind]}
OF_VLLM = {"model_name", "engine"}
VLLMS_OWN = "vllm:time_to_first_token_seconds_bucket"


QUERIES = [(target["expr"], target["legendFormat"]) for panel in PANELS for target in panel["targets"]]
"""Expression and legend."""


def _named(text: str) -> list[str]:
    return re.findall(r"vllm:kvdisk_(\w+)", text)


def test_every_metric_that_the_dashboard_names_exists_with_its_suffix_and_labels():
    for expression, legend in QUERIES:
        names = _named(expression)
        assert (names or VLLMS_OWN in expression) and not set(names) - set(NAMES), expression
        known = {label for name in names for label in [NAMES[name].label] if label} | OF_VLLM
        grouped = set(re.findall(r"\w+", " ".join(re.findall(r"\bby \(([^)]*)\)", expression))))
        filtered = set(re.findall(r"(\w+)\s*=~?", expression))
        assert not grouped - {"le"} - known and not filtered - known, expression
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) == grouped - {"le"}, (expression, legend)
        for name in names:
            rated = re.search(rf"(rate|increase)\(vllm:kvdisk_{name}\{{", expression) is not None
            assert rated == (NAMES[name].kind is not Kind.GAUGE), expression
            if name.endswith("_bucket"):
                assert "histogram_quantile" in expression and "le" in grouped


def test_few_panels_are_seen_first_and_each_has_a_number_of_its_own():
    folded = [row for row in BOARD["panels"] if row["type"] == "row"]
    assert len(VISIBLE) <= 12 and all(row["collapsed"] and row["panels"] for row in folded)
    assert len({panel["id"] for panel in [*PANELS, *folded]}) == len(PANELS) + len(folded)


def test_the_first_row_is_of_numbers():
    first = [panel for panel in VISIBLE if panel["gridPos"]["y"] == 0]
    assert {panel["type"] for panel in first} == {"stat"} and VISIBLE[: len(first)] == first
    asked = [panel["targets"][0]["expr"] for panel in first]
    wanted = ("hit_tokens_total", "saved_seconds_total", VLLMS_OWN, "used_bytes", "failed_loads_total")
    assert [name for name, text in zip(wanted, asked, strict=True) if name not in text] == []


def test_every_metric_has_a_panel_or_is_left_out_on_purpose():
    shown = {NAMES[name].name for expression, _ in QUERIES for name in _named(expression)}
    assert shown | set(LEFT_OUT) == set(METRICS)
    assert not shown & set(LEFT_OUT)
