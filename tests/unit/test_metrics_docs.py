# SPDX-License-Identifier: Apache-2.0
"""What is said about metrics outside of the code: the page, and the dashboard for Grafana."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from metrics_table import PAGE, with_tables

from kvdisk.stats import METRICS, Kind

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "kvdisk.json"
LEFT_OUT = {
    "held_blocks": "used_bytes says the same",
    "budget_pauses": "write_budget_bytes shows them",
    "lost_events": "of interest to those who listen to events only",
}
SUFFIXES = {Kind.COUNTER: ("_total",), Kind.GAUGE: ("",), Kind.HISTOGRAM: ("_bucket", "_sum", "_count")}
NAMES = {f"{metric.name}{suffix}": (metric, suffix) for metric in METRICS.values() for suffix in SUFFIXES[metric.kind]}
OF_VLLM = {"model_name", "engine"}


def _dashboard() -> dict:
    return json.loads(DASHBOARD.read_text())


def _panels(board: dict) -> list[dict]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def _queries(board: dict) -> list[tuple[str, str]]:
    """Return (expression, legend) of every panel, and the questions of the variables."""
    found = [(target["expr"], target["legendFormat"]) for panel in _panels(board) for target in panel["targets"]]
    found += [(one["query"]["query"], "") for one in board["templating"]["list"] if one["type"] == "query"]
    return found


def _named(text: str) -> list[str]:
    return re.findall(r"vllm:kvdisk_(\w+)", text)


def _labels(expression: str) -> set[str]:
    """Return the labels that an expression filters or groups by, or asks for."""
    groups = " ".join(re.findall(r"\bby \(([^)]*)\)", expression)) + " "
    filters = " ".join(re.findall(r"(\w+)\s*=~?", expression)) + " "
    asked = " ".join(re.findall(r"label_values\(.*, (\w+)\)", expression))
    return set(re.findall(r"\w+", groups + filters + asked))


def test_the_page_has_every_metric_as_the_table_has_it():
    assert PAGE.read_text() == with_tables(PAGE.read_text()), "python tools/metrics_table.py writes it anew"
    named = {name.removesuffix("_total") for name in _named(PAGE.read_text())}
    assert named == set(METRICS)


@pytest.mark.parametrize("damage", ["| what it is |", "| `vllm:kvdisk_stored_blocks_total` |"])
def test_a_page_that_is_not_the_table_is_noticed(damage):
    text = PAGE.read_text()
    assert damage in text
    assert with_tables(text.replace(damage, "| changed |")) == text


def test_the_dashboard_can_be_imported():
    board = _dashboard()
    assert board["id"] is None and board["uid"] and board["title"] == "kvdisk" and board["schemaVersion"] >= 36
    variables = {one["name"]: one for one in board["templating"]["list"]}
    assert list(variables) == ["datasource", "model", "engine"]
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    taken = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + column, place["y"] + line) for column in range(place["w"]) for line in range(place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, f"{panel['title']} lies on another"
        taken |= cells
    for panel in _panels(board):
        assert panel["title"] and panel["description"] and panel["targets"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        for asked in (panel, *panel["targets"]):
            assert asked["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        refs = [target["refId"] for target in panel["targets"]]
        assert len(refs) == len(set(refs))


def test_every_metric_that_the_dashboard_names_exists_with_its_suffix_and_labels():
    queries = _queries(_dashboard())
    assert len(queries) > 30
    for expression, legend in queries:
        names = _named(expression)
        assert names and not set(names) - set(NAMES), expression
        known = {label for name in names for label in [NAMES[name][0].label] if label} | OF_VLLM
        if any(name.endswith("_bucket") for name in names):
            known.add("le")
        assert not _labels(expression) - known, expression
        assert not set(re.findall(r"\{\{(\w+)\}\}", legend)) - known, legend
        assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")
        for name in names:
            metric, suffix = NAMES[name]
            if "label_values" not in expression:
                rated = f"rate(vllm:kvdisk_{name}{{" in expression
                assert rated == (metric.kind is not Kind.GAUGE), expression
            if suffix == "_bucket":
                assert "histogram_quantile" in expression and "le" in _labels(expression)


def test_what_a_legend_shows_is_grouped_by():
    for expression, legend in _queries(_dashboard()):
        grouped = set(re.findall(r"\w+", " ".join(re.findall(r"\bby \(([^)]*)\)", expression))))
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) == grouped - {"le"}, (expression, legend)


def test_every_metric_has_a_panel_or_is_left_out_on_purpose():
    shown = {NAMES[name][0].name for expression, _ in _queries(_dashboard()) for name in _named(expression)}
    assert shown | set(LEFT_OUT) == set(METRICS)
    assert not shown & set(LEFT_OUT)
