"""An operator's view of a running system: what Prometheus, the board and `quartet top` get of it."""

import os
import subprocess
import sys

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.deployment.monitoring import expressions, metrics_in, scraped_metrics
from tests.support.systems.stack import ANSWER_GUARD_S, Stack, until

pytestmark = pytest.mark.e2e

STAGES = ("thinker", "talker", "code2wav")
SPOKEN = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "What is the sea?"}],
    "modalities": ["text", "audio"],
    "audio": {"format": "wav"},
    "max_tokens": 24,
    "temperature": 0,
}


def families(stack: Stack, name: str) -> set[str]:
    """Names of the samples a process's page has or, of a family without any yet, could have."""
    address = stack.state["processes"][name]["metrics_address"]
    page = httpx.get(f"http://{address}/metrics", timeout=ANSWER_GUARD_S).text
    names = set()
    for family in text_string_to_metric_families(page):
        ending = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        names |= {f"{family.name}{part}" for part in ending} | {sample.name for sample in family.samples}
    return names


@pytest.fixture(scope="module")
def used(stack: Stack) -> Stack:
    """A system that has spoken."""
    response = stack.http.post("/v1/chat/completions", json=SPOKEN | {"model": stack.model})
    assert response.status_code == 200, response.text
    until(lambda: all(idle(stack, name) for name in STAGES), "a stage counts a request just after its last word")
    return stack


def idle(stack: Stack, stage: str) -> bool:
    """Whether it has counted a request to its end, and holds nothing of any."""
    held = ("requests_in_flight", "requests_running", "requests_queued", "stream_credits_outstanding")
    page = stack.page(stage)
    counted = page.total("quartet_first_output_seconds_count", stage=stage) or 0
    holds = [page.total(f"quartet_{name}", stage=stage) for name in (*held, "kv_cache_used_ratio")]
    return counted >= 1 and not any(holds)


def test_every_metric_of_board_and_rules_is_in_a_scrape(used: Stack):
    scraped = set().union(*(families(used, name) for name in (*STAGES, "gateway")))
    asked: set[str] = set()
    for _, expression in expressions():
        asked |= {name for name, _ in metrics_in(expression) if ":" not in name} | scraped_metrics(expression)
    assert len(asked) > 30
    assert asked <= scraped, f"nothing serves {asked - scraped}"


def test_a_spoken_request_left_its_numbers_everywhere(used: Stack):
    pages = {name: used.state["processes"][name]["metrics_address"] for name in STAGES}
    samples: dict[str, dict] = {}
    for stage, address in pages.items():
        page = httpx.get(f"http://{address}/metrics", timeout=ANSWER_GUARD_S).text
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.labels.get("stage") == stage:
                    key = sample.labels.get("consumer") or sample.labels.get("call") or ""
                    samples.setdefault(stage, {})[sample.name, key] = sample.value
    for stage, call in (("thinker", "step"), ("talker", "frame"), ("code2wav", "decode")):
        assert samples[stage]["quartet_first_output_seconds_count", ""] >= 1
        assert samples[stage]["quartet_step_seconds_count", call] >= 1
        assert samples[stage]["quartet_step_batch_size_sum", call] >= 1
        assert samples[stage]["quartet_requests_running", ""] == samples[stage]["quartet_requests_queued", ""] == 0
    for stage, consumer in (("thinker", "talker"), ("talker", "code2wav")):
        assert samples[stage]["quartet_stream_bytes_total", consumer] > 0
        assert samples[stage]["quartet_stream_chunk_seconds_count", consumer] >= 1
        assert samples[stage]["quartet_stream_credits_outstanding", ""] == 0  # nobody reads now
    assert samples["thinker"]["quartet_kv_cache_used_ratio", ""] == 0
    assert samples["talker"]["quartet_kv_cache_used_ratio", ""] == 0


def test_top_shows_the_stages(used: Stack):
    command = [sys.executable, "-m", "cli.main", "top", "--once", "--run-dir", str(used.run_directory)]
    environment = {**os.environ, "COLUMNS": "160"}
    rows: dict[str, list[str]] = {}
    shown = ""

    def reached() -> bool:
        """Whether everyone has answered it in the 2 s that it waits."""
        nonlocal rows, shown
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        table = [line.strip("│").split("│") for line in done.stdout.splitlines() if line.startswith("│")]
        rows, shown = {row[0].strip(): [cell.strip() for cell in row] for row in table}, done.stdout
        return shown.count("SERVING") == len(STAGES) and all("-" not in rows[stage][:6] for stage in STAGES)

    until(reached, "a table with every stage")
    for stage in STAGES:
        name, state, running, queued, _, step_ms, batch, _, first_ms = rows[stage]
        assert (name, state, running, queued) == (stage, "SERVING", "0", "0")
        assert min(float(step_ms), float(batch), float(first_ms)) > 0
    assert "TTFA p50" in shown
