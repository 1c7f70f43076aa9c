"""What deploy/monitoring asks of the metrics: names and labels in the board's and the rules' expressions."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

FOLDER = Path(__file__).parents[3] / "deploy" / "monitoring"
BOARD = FOLDER / "grafana" / "dashboards" / "quartet.json"

_METRIC = re.compile(r"\b((?:stage|stage_call)?:?quartet_[a-z0-9_]+(?::[a-z0-9_]+)?)(?:\{([^}]*)\})?")
_GROUPED = re.compile(r"\bby \(([^)]*)\)")
# Labels that Prometheus adds to what it scrapes.
SCRAPED = {"instance", "job", "le"}


def rules() -> list[dict]:
    """All rules, recorded ones and alerts."""
    return [rule for group in yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"] for rule in group["rules"]]


def recorded() -> dict[str, str]:
    """Expressions of the recorded series, by name."""
    return {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}


def board_expressions() -> Iterator[tuple[str, str]]:
    """(panel, expression)"""
    for panel in json.loads(BOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def expressions() -> Iterator[tuple[str, str]]:
    """(where, expression), of board and rules."""
    yield from board_expressions()
    for rule in rules():
        yield rule.get("alert") or rule["record"], rule["expr"]


def metrics_in(expression: str) -> Iterator[tuple[str, set[str]]]:
    """(name, labels that select or group it)"""
    grouped = {label.strip() for labels in _GROUPED.findall(expression) for label in labels.split(",")}
    for name, selector in _METRIC.findall(expression):
        yield name, grouped | set(re.findall(r"(\w+)\s*[=!]", selector))


def scraped_metrics(expression: str) -> set[str]:
    """Names that a scrape must have, recorded series traced back to what they are made of."""
    made = recorded()
    found: set[str] = set()
    for name, _ in metrics_in(expression):
        found |= scraped_metrics(made[name]) if name in made else {name}
    return found
