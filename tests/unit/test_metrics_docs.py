# SPDX-License-Identifier: Apache-2.0
"""The dashboard for Grafana and the alerts for Prometheus: that they ask for metrics that there
are, as they are. The page: ``test_docs``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from kvdisk.stats import FAILURES, HARMLESS, METRICS, Kind

ROOT = Path(__file__).resolve().parents[2]
BOARD = json.loads((ROOT / "docs/grafana/kvdisk.json").read_text())
VISIBLE = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
PANELS = [*VISIBLE, *(panel for row in BOARD["panels"] for panel in row.get("panels", ()))]
LEFT_OUT = {
    "held_blocks": "used_bytes says the same",
    "expired_blocks": "only with max_age_s, and nothing to act on",
    "budget_pauses": "write_budget_bytes shows them",
    "share_evicted_blocks": "only with salt_share: refused_blocks and evicted_unwritten show who is held back",
    "moved_segments": "evicted_blocks shows what it costs",
    "remote_paused": "remote_questions stop rising",
    "remote_read_bytes": "transfer_bytes says what blocks have; only with remote_codec is it another number",
    "remote_written_bytes": "the same",
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


def test_errors_are_all_that_fails_and_nothing_that_a_healthy_machine_has():
    """It is what ``kvdisk top`` shows in red."""
    (errors,) = [panel for panel in VISIBLE if panel["title"] == "Errors"]
    shown = {NAMES[name].name for name in _named(errors["targets"][0]["expr"])}
    assert shown == {series.partition(".")[0] for series in FAILURES}
    assert not shown & set(HARMLESS) and set(HARMLESS) <= set(METRICS)


# -- alerts ----------------------------------------------------------------------------------------

(GROUP,) = yaml.safe_load((ROOT / "docs/deploy/alerts.yml").read_text())["groups"]
RULES = GROUP["rules"]


def test_every_alert_asks_for_series_that_exist_and_is_well_formed():
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert set(rule) - {"for"} == {"alert", "expr", "labels", "annotations"}
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert set(rule["annotations"]) == {"summary", "description"}
        expression = rule["expr"]
        assert expression.count("(") == expression.count(")") and expression.endswith(" > 0")
        names = re.findall(r"vllm:\w+", expression)
        assert names and all(name.removeprefix("vllm:kvdisk_") in NAMES for name in names), expression
        for name in _named(expression):
            counted = re.search(rf"increase\(vllm:kvdisk_{name}\[\d+[mh]\]\)", expression) is not None
            assert counted == (NAMES[name].kind is Kind.COUNTER), expression
        (grouped, *others) = {tuple(re.findall(r"\w+", by)) for by in re.findall(r"by \(([^)]*)\)", expression)}
        assert not others, "sums of series that are grouped alike"
        assert set(grouped) <= OF_VLLM | {NAMES[name].label for name in _named(expression)}
        texts = " ".join(rule["annotations"].values())
        assert set(re.findall(r"\$labels\.(\w+)", texts)) <= set(grouped)


def test_there_is_an_alert_for_all_that_is_to_be_watched_and_for_nothing_harmless():
    alarmed = {NAMES[name].name for rule in RULES for name in _named(rule["expr"])}
    page = (ROOT / "docs/OPERATING.md").read_text()
    table = page[page.index("| alert on | a rise means |") :].partition("\n\n")[0]
    watched = set(re.findall(r"`(\w+)`", table))
    assert len(watched) >= 8 and watched <= alarmed
    assert {series.partition(".")[0] for series in FAILURES} <= alarmed
    assert not alarmed & set(HARMLESS)


# -- texts -----------------------------------------------------------------------------------------


def test_the_text_of_each_metric_stands_alone():
    """Prometheus and Grafana show one at a time."""
    pointing = re.compile(r"\b(these|those of it|such|likewise|the same|above|below|it takes)\b")
    assert [metric.name for metric in METRICS.values() if pointing.search(metric.about)] == []
