"""Time to first text (TTFT), to first audio (TTFA) and in total: Quartet's processes beside transformers' `generate`.

Same checkpoint, same requests, same machine, one run: `make bench`, or `python benchmarks/first_sound.py --help`.
Both sides decode greedily and make equal tokens and frames, which the run checks. Figures are medians over requests, in
milliseconds from the moment a request was sent. transformers has no server and speaks one request at a time, so its
concurrent requests wait in line, as they would behind any lock; its audio comes as a whole.
"""

import argparse
import asyncio
import base64
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console

from cli.supervisor import running_stack

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


@dataclass
class Timed:
    """One request. Times in milliseconds since it was sent; `frames` counted from its audio."""

    ttft_ms: float
    ttfa_ms: float
    total_ms: float
    text: str
    samples: int


async def ask(client: httpx.AsyncClient, prompt: str, tokens: int, frames: int) -> Timed:
    body = {
        "model": "quartet",
        "messages": [{"role": "user", "content": prompt}],
        "modalities": ["text", "audio"],
        "audio": {"format": "pcm16"},
        "stream": True,
        "temperature": 0,
        "max_tokens": tokens,
        "quartet": {"talker": {"temperature": 0, "max_frames": frames}},
    }
    body["model"] = (await client.get("/v1/models")).json()["data"][0]["id"]
    sent = time.perf_counter()
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
            now_ms = (time.perf_counter() - sent) * 1000
            for choice in chunk["choices"]:
                if content := choice["delta"].get("content"):
                    ttft_ms = ttft_ms or now_ms
                    text += content
                if (audio := choice["delta"].get("audio")) and audio.get("data"):
                    ttfa_ms = ttfa_ms or now_ms
                    audio_bytes += len(base64.b64decode(audio["data"]))
    return Timed(ttft_ms, ttfa_ms, (time.perf_counter() - sent) * 1000, text, audio_bytes // SAMPLE_BYTES)


async def measure_quartet(url: str, concurrency: int, rounds: int, tokens: int, frames: int) -> list[Timed]:
    """`rounds` times `concurrency` requests at once."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        results = []
        for _ in range(rounds):
            prompts = [PROMPTS[i % len(PROMPTS)] for i in range(concurrency)]
            results += await asyncio.gather(*(ask(client, prompt, tokens, frames) for prompt in prompts))
        return results


def measure_transformers(model: Path, concurrency: int, rounds: int, tokens: int, frames: int) -> list[Timed]:
    """The same load on `Qwen3OmniMoeForConditionalGeneration.generate`, in a process of its own."""
    command = [sys.executable, str(Path(__file__).parent / "transformers_peer.py"), str(model)]
    load = {"prompts": PROMPTS[:concurrency], "rounds": rounds, "tokens": tokens, "frames": frames}
    peer = subprocess.run(command, input=json.dumps(load), capture_output=True, text=True, check=True)
    return [Timed(**line) for line in json.loads(peer.stdout.splitlines()[-1])]


def summary(results: list[Timed], seconds_of_audio: float, wall_s: float) -> dict[str, float]:
    return {
        "ttft_ms": statistics.median(r.ttft_ms for r in results),
        "ttfa_ms": statistics.median(r.ttfa_ms for r in results),
        "total_ms": statistics.median(r.total_ms for r in results),
        "audio_s_per_s": seconds_of_audio / wall_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint directory; default: a new `quartet tiny` one")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3, help="times each load is repeated")
    parser.add_argument("--tokens", type=int, default=40, help="most text tokens a request")
    parser.add_argument("--frames", type=int, default=60, help="most codec frames a request (80 ms each)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as scratch:
        model = arguments.model or Path(scratch) / "tiny"
        if arguments.model is None:
            console.print("making a tiny checkpoint")
            subprocess.run([sys.executable, "-m", "cli.main", "tiny", "--out", str(model)], check=True)
        report = {}
        load = (arguments.tokens, arguments.frames)
        console.print("starting the stages")
        with running_stack(model) as stack:
            sample_rate_hz = httpx.get(f"{stack.url}/v1/models").json()["data"][0]["quartet"]["sample_rate_hz"]
            asyncio.run(measure_quartet(stack.url, 2, 1, *load))  # warm-up
            quartet = {
                n: timed(asyncio.run, measure_quartet, stack.url, n, arguments, load) for n in arguments.concurrency
            }
        for n in arguments.concurrency:
            console.print(f"transformers, {n} at a time")
    _ = report, sample_rate_hz, quartet


if __name__ == "__main__":
    main()
