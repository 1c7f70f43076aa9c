"""An operator's view of a running system: what Prometheus, the board and `quartet top` get of it."""

import os
import subprocess
import sys

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.monitoring import expressions, metrics_in, scraped_metrics
from tests.support.stack import Stack

pytestmark = pytest.mark.e2e

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
    page = httpx.get(f"http://{stack.state['processes'][name]['metrics_address']}/metrics", timeout=5).text
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
    return stack


def test_every_metric_of_board_and_rules_is_in_a_scrape(used: Stack):
    scraped = set().union(*(families(used, name) for name in (*("thinker", "talker", "code2wav"), "gateway")))
    asked: set[str] = set()
    for _, expression in expressions():
        asked |= {name for name, _ in metrics_in(expression) if ":" not in name} | scraped_metrics(expression)
    assert len(asked) > 30
    assert asked <= scraped, f"nothing serves {asked - scraped}"


def test_a_spoken_request_left_its_numbers_everywhere(used: Stack):
    pages = {name: used.state["processes"][name]["metrics_address"] for name in ("thinker", "talker", "code2wav")}
    samples: dict[str, dict] = {}
    for stage, address in pages.items():
        page = httpx.get(f"http://{address}/metrics", timeout=5).text
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("SERVING") == len(("thinker", "talker", "code2wav"))
    for stage in ("thinker", "talker", "code2wav"):
        (row,) = [line for line in done.stdout.splitlines() if f" {stage} " in line]
        cells = [cell.strip() for cell in row.strip("│").split("│")]
        name, state, running, queued, _, step_ms, batch, _, first_ms = cells
        assert (name, state, running, queued) == (stage, "SERVING", "0", "0")
        assert min(float(step_ms), float(batch), float(first_ms)) > 0
    assert "TTFA p50" in done.stdout
