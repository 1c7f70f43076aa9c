"""Time to first text (TTFT), to first audio (TTFA) and in total: Quartet's processes beside transformers' `generate`.

Same checkpoint, same requests, same machine, one run: `make bench`, or `python benchmarks/first_sound.py --help`.
Both sides decode greedily and must say the same, which the run checks. Times are medians over requests, in milliseconds
from the moment a request was sent. transformers has no server and speaks one request at a time, so its concurrent
requests wait in line, as they would behind any lock, and its audio comes as a whole.
"""

import argparse
import asyncio
import base64
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from cli.supervisor import Options, free_ports
from cli.tiny import make_checkpoint
from cli.up import running

PROMPTS = [
    "Tell me about the sea.",
    "Why is the sky blue in the morning?",
    "Name three things that swim.",
    "What does a train sound like?",
    "Describe a quiet street at night.",
    "How do bees find their way home?",
    "Say something kind to a friend.",
    "What is the best way to learn to sing?",
]
SAMPLE_BYTES = 2  # PCM16
FIGURES = {"ttft_ms": "TTFT ms", "ttfa_ms": "TTFA ms", "total_ms": "total ms", "audio_s_per_s": "audio s/s"}

console = Console()


@dataclass(frozen=True)
class Timed:
    """One request; times in milliseconds since it was sent."""

    ttft_ms: float
    ttfa_ms: float
    total_ms: float
    text: str
    samples: int


@dataclass(frozen=True)
class Load:
    """What is asked: `rounds` times all of `prompts` at once."""

    prompts: list[str]
    rounds: int
    tokens: int
    frames: int


async def ask(client: httpx.AsyncClient, model: str, prompt: str, load: Load) -> Timed:
    """One streamed request with speech."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "modalities": ["text", "audio"],
        "audio": {"format": "pcm16"},
        "stream": True,
        "temperature": 0,
        "max_tokens": load.tokens,
        "quartet": {"talker": {"temperature": 0, "max_frames": load.frames}},
    }
    sent_s = time.perf_counter()
    ttft_ms = ttfa_ms = 0.0
    text, audio_bytes = "", 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            now_ms = (time.perf_counter() - sent_s) * 1000
            for choice in chunk["choices"]:
                if content := choice["delta"].get("content"):
                    ttft_ms = ttft_ms or now_ms
                    text += content
                if data := (choice["delta"].get("audio") or {}).get("data"):
                    ttfa_ms = ttfa_ms or now_ms
                    audio_bytes += len(base64.b64decode(data))
    return Timed(ttft_ms, ttfa_ms, (time.perf_counter() - sent_s) * 1000, text, audio_bytes // SAMPLE_BYTES)


async def measure_quartet(url: str, load: Load) -> tuple[float, list[Timed]]:
    """Seconds it took, and each request."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        results, began_s = [], time.perf_counter()
        for _ in range(load.rounds):
            results += await asyncio.gather(*(ask(client, model, prompt, load) for prompt in load.prompts))
        return time.perf_counter() - began_s, results


def measure_transformers(model: Path, loads: list[Load]) -> list[tuple[float, list[Timed]]]:
    """The same on `Qwen3OmniMoeForConditionalGeneration.generate`, in a process of its own with all cores."""
    command = [sys.executable, str(Path(__file__).with_name("transformers_peer.py")), str(model)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count())}
    lines = "\n".join(json.dumps(vars(load)) for load in loads)
    peer = subprocess.run(command, input=lines, capture_output=True, text=True, check=True, env=environment)
    answers = [json.loads(line) for line in peer.stdout.splitlines() if line.startswith("{")]
    return [(answer["wall_s"], [Timed(**request) for request in answer["requests"]]) for answer in answers]


def figures(wall_s: float, results: list[Timed], sample_rate_hz: int) -> dict[str, float]:
    """Medians over the requests that spoke, and seconds of audio made in a second."""
    spoke = [r for r in results if r.samples]
    times = {name: statistics.median(getattr(r, name) for r in spoke) for name in ("ttft_ms", "ttfa_ms", "total_ms")}
    return {**times, "audio_s_per_s": sum(r.samples for r in results) / sample_rate_hz / wall_s}


def report(rows: dict[int, tuple[dict[str, float], dict[str, float]]]) -> Table:
    """Both sides for each concurrency, and how many times better Quartet is."""
    table = Table(title="Quartet beside transformers' generate", title_justify="left")
    for title in ("at a time", "figure", "Quartet", "transformers", "times better"):
        table.add_column(title, justify="left" if title == "figure" else "right")
    for concurrency, (ours, theirs) in rows.items():
        for name, title in FIGURES.items():
            ratio = ours[name] / theirs[name] if name == "audio_s_per_s" else theirs[name] / ours[name]
            table.add_row(str(concurrency), title, f"{ours[name]:.1f}", f"{theirs[name]:.1f}", f"{ratio:.1f}")
        table.add_section()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint directory; default: a new `quartet tiny` one")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8], choices=range(1, len(PROMPTS) + 1))
    parser.add_argument("--rounds", type=int, default=5, help="times each load is repeated")
    parser.add_argument("--tokens", type=int, default=40, help="most text tokens a request")
    parser.add_argument("--frames", type=int, default=60, help="most codec frames a request (80 ms each)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    loads = [Load(PROMPTS[:n], arguments.rounds, arguments.tokens, arguments.frames) for n in arguments.concurrency]
    with tempfile.TemporaryDirectory(prefix="quartet-bench-") as scratch:
        model = arguments.model or make_checkpoint(Path(scratch) / "tiny", seed=0, size="tiny")
        with running(Options(str(model), port=free_ports(1)[0], run_directory=Path(scratch) / "run")) as stack:
            facts: dict[str, Any] = httpx.get(f"{stack.url}/v1/models").json()["data"][0]["quartet"]
            asyncio.run(measure_quartet(stack.url, Load(PROMPTS, 1, arguments.tokens, arguments.frames)))  # warm-up
            quartet = []
            for load in loads:
                console.print(f"Quartet, {len(load.prompts)} at a time")
                quartet.append(asyncio.run(measure_quartet(stack.url, load)))
        console.print("transformers, one after another")
        peer = measure_transformers(model, loads)
    rows = {}
    for load, ours, theirs in zip(loads, quartet, peer, strict=True):
        for our, their in zip(ours[1], theirs[1], strict=True):
            if (our.text, our.samples) != (their.text, their.samples):
                sys.exit(f"no figures, for the two sides did not say the same:\n{our}\n{their}")
        rate_hz = facts["sample_rate_hz"]
        rows[len(load.prompts)] = figures(*ours, rate_hz), figures(*theirs, rate_hz)
    console.print(report(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
