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
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
LEFT_OUT = {
    "held_blocks": "used_bytes says the same",
    "budget_pauses": "write_budget_bytes shows them",
    "lost_events": "of interest to those who listen to events only",
}
SUFFIXES = {Kind.COUNTER: ("_total",), Kind.GAUGE: ("",), Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}
NAMES = {f"{metric.name}{suffix}": metric for metric in METRICS.values() for suffix in SUFFIXES[metric.kind]}
OF_VLLM = {"model_name", "engine"}


QUERIES = [(target["expr"], target["legendFormat"]) for panel in PANELS for target in panel["targets"]]
"""Expression and legend."""


def _named(text: str) -> list[str]:
    return re.findall(r"vllm:kvdisk_(\w+)", text)


def test_every_metric_that_the_dashboard_names_exists_with_its_suffix_and_labels():
    for expression, legend in QUERIES:
        names = _named(expression)
        assert names and not set(names) - set(NAMES), expression
        known = {label for name in names for label in [NAMES[name].label] if label} | OF_VLLM
        grouped = set(re.findall(r"\w+", " ".join(re.findall(r"\bby \(([^)]*)\)", expression))))
        filtered = set(re.findall(r"(\w+)\s*=~?", expression))
        assert not grouped - {"le"} - known and not filtered - known, expression
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) == grouped - {"le"}, (expression, legend)
        for name in names:
            rated = f"rate(vllm:kvdisk_{name}{{" in expression
            assert rated == (NAMES[name].kind is not Kind.GAUGE), expression
            if name.endswith("_bucket"):
                assert "histogram_quantile" in expression and "le" in grouped


def test_every_metric_has_a_panel_or_is_left_out_on_purpose():
    shown = {NAMES[name].name for expression, _ in QUERIES for name in _named(expression)}
    assert shown | set(LEFT_OUT) == set(METRICS)
    assert not shown & set(LEFT_OUT)
