"""deploy/monitoring: Prometheus accepts it, its rules do what they say, and it asks for metrics that exist."""

import importlib
import json
import shutil
import subprocess

import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase

from tests.support.deployment.monitoring import BOARD, FOLDER, SCRAPED, expressions, metrics_in, recorded, rules

MODULES = (
    "gateway.metrics",
    "services.common.telemetry.metrics",
    "services.thinker.metrics",
    "services.talker.engine",
    "services.code2wav.engine",
    "services.dit.engine",
)
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (package prometheus)")


def known() -> dict[str, set[str]]:
    """Every name that the code's metrics have in a scrape, and its labels."""
    names: dict[str, set[str]] = {}
    for module in MODULES:
        for metric in vars(importlib.import_module(module)).values():
            if not isinstance(metric, MetricWrapperBase):
                continue
            (family,) = metric.describe()
            endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}[family.type]
            for ending in endings:
                names[f"{family.name}{ending}"] = set(metric._labelnames)
    return names


def promtool(*arguments: str) -> None:
    done = subprocess.run(
        ["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_takes_its_configuration():
    promtool("check", "config", "prometheus.yml")


@needs_promtool
def test_rules_fire_when_they_should():
    promtool("check", "rules", "rules.yml")
    promtool("test", "rules", "rules_test.yml")


def test_every_alert_is_tested_to_fire_and_to_be_quiet():
    tests = yaml.safe_load((FOLDER / "rules_test.yml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == alerts
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == alerts


def test_board_and_rules_ask_for_metrics_and_labels_that_the_code_has():
    names, made = known(), recorded()
    count = 0
    for where, expression in expressions():
        for name, labels in metrics_in(expression):
            count += 1
            if name in made:
                continue
            assert name in names, f"{where}: no metric {name}"
            assert labels <= names[name] | SCRAPED, f"{where}: {name} has no label {labels - names[name] - SCRAPED}"
    assert count > 50


def test_all_metrics_are_in_the_documentation():
    text = (FOLDER.parents[1] / "docs" / "services.md").read_text()
    for name in known():
        family = name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        assert f"`{family}`" in text, f"docs/services.md does not say what {family} is"


def test_prometheus_scrapes_every_stage():
    from gateway.pipeline.kinds import KINDS

    jobs = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    assert {job["job_name"] for job in jobs} == {"gateway", *KINDS, "asr"}
    for job in jobs:
        (found,) = job["dns_sd_configs"]
        assert found["names"] == [job["job_name"]]
        assert found["port"] == (8000 if job["job_name"] == "gateway" else 9464)


def test_the_board_is_whole():
    board = json.loads(BOARD.read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["datasource"]["uid"] == "prometheus"
    source = yaml.safe_load((FOLDER / "grafana/provisioning/datasources/prometheus.yaml").read_text())
    assert [entry["uid"] for entry in source["datasources"]] == ["prometheus"]


def test_the_collectors_pipelines_name_what_there_is():
    otel = yaml.safe_load((FOLDER / "otel.yaml").read_text())
    for pipeline in otel["service"]["pipelines"].values():
        for kind, entries in pipeline.items():
            assert set(entries) <= set(otel[kind])
    assert set(otel["service"]["extensions"]) <= set(otel["extensions"])
    assert otel["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].endswith(":4317")
