"""The Grafana dashboard and the Prometheus rules of examples/ ask for series that a server exports, by labels that those series have.

Both were also run: Prometheus 2.42 scraping a server, every query of the dashboard and every rule evaluated (docs/serve.md).
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from rig import HI, serving

TARGET = {"instance", "job"}  # labels that Prometheus adds to all it scrapes
SELECTOR = re.compile(r"(mlsdc:\w+)(?:\{([^}]*)\})?")
BY = re.compile(r"\bby \(([^)]*)\)")
FUNCTIONS = {"sum", "max", "rate", "deriv", "min_over_time", "histogram_quantile", "by", "and"}


@cache
def exported() -> dict[str, set[str]]:
    """Labels of every series of /metrics, by its name, after some traffic."""
    async def main() -> str:
        async with serving() as rig:
            await rig.http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 30, "temperature": 0})
            await rig.http.post("/v1/completions", json={"prompt": "abc" * 9, "max_tokens": 30})
            return (await rig.http.get("/metrics")).text

    families = text_string_to_metric_families(asyncio.run(main()))
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def check_query(expr: str) -> set[str]:
    """The labels of what it brings. Names, labels, brackets and functions must be known."""
    found = SELECTOR.findall(expr)
    assert found, expr
    labels: set[str] = set()
    for name, matchers in found:
        assert name in exported(), f"{name}: no such series ({expr})"
        asked = set(re.findall(r'(\w+)(?:=~|!~|!=|=)"', matchers))
        assert asked <= exported()[name] | TARGET, f"{name}: has no label {asked - exported()[name]}"
        labels |= exported()[name] | TARGET
    grouped = [set(re.split(r",\s*", names)) for names in BY.findall(expr)]
    assert all(names <= labels for names in grouped), expr
    for opening, closing in ("()", "[]", "{}"):
        assert expr.count(opening) == expr.count(closing), expr
    words = set(re.findall(r"(?<![\w:$\"])([a-z_]+) ?\(", expr))
    assert words <= FUNCTIONS, expr
    if "sum(" in expr or "max(" in expr:
        return set()
    return set.intersection(*(names - {"le"} for names in grouped)) if grouped else labels


def dashboard(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "examples" / "grafana-dashboard.json").read_text())
    return found


def rules(root: Path) -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((root / "examples" / "prometheus-alerts.yaml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def test_every_query_of_the_dashboard_finds_its_series_and_names_them_by_labels_they_have(root: Path) -> None:
    queries = [target for panel in dashboard(root)["panels"] for target in panel["targets"]]
    assert len(queries) > 20
    for target in queries:
        labels = check_query(target["expr"])
        assert set(re.findall(r"{{\s*(\w+)\s*}}", target["legendFormat"])) <= labels, target
    for variable in dashboard(root)["templating"]["list"]:
        if variable["type"] == "query":
            name, label = re.fullmatch(r"label_values\((\S+), (\w+)\)", variable["query"]).groups()  # type: ignore[union-attr]
            assert label in exported()[name]


def test_panels_have_places_of_their_own_and_the_variables_they_use(root: Path) -> None:
    found = dashboard(root)
    names = {variable["name"] for variable in found["templating"]["list"]} | {"__rate_interval"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(found["panels"]))) <= names | {"__all"}
    ids = [panel["id"] for panel in found["panels"]]
    assert len(set(ids)) == len(ids)
    cells = [(x, y) for panel in found["panels"] for at in [panel["gridPos"]]
             for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_alerts_find_their_series_and_say_what_they_know(root: Path) -> None:
    for rule in rules(root):
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert re.fullmatch(r"\d+[sm]", rule["for"])
        labels = check_query(rule["expr"])
        assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= labels, rule["alert"]


def test_promtool_accepts_the_rules(root: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (Debian's package prometheus) is not installed")
    command = [promtool, "check", "rules", root / "examples" / "prometheus-alerts.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_server_that_refused_nobody_says_zero() -> None:
    """A series that begins with its first event has no rate then: an alert on it would miss it."""
    async def main() -> None:
        async with serving() as rig:
            assert await rig.metric('request_refused_total{model_name="fake",status="429"}') == 0
            for reason in ("stop", "length", "abort", "error"):
                assert await rig.metric(f'request_success_total{{finished_reason="{reason}",model_name="fake"}}') == 0

    asyncio.run(main())
