"""The same load over HTTP and by `quartet.AsyncOmni`, to the same stages, in turns: what the Python API costs or saves.

A system is started on a small random checkpoint. In each round both sides send the same questions, so many at a time,
and the one that goes first changes from round to round. Nothing is printed unless both said the same.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.traffic.client import Gateway, Wish
from benchmarks.traffic.load import PROMPTS, closed_loop
from cli.plan import LaunchOptions
from cli.supervisor import free_ports
from cli.tiny import make_checkpoint
from cli.up import console, running
from quartet import AsyncOmni
from quartet.messages import PromptOptions

Said = list[tuple[str, int]]  # of each request its text, and samples of audio


async def over_http(gateway: Gateway, flags: argparse.Namespace) -> tuple[float, Said]:
    """Seconds that the load takes over HTTP, streamed, and what was said."""
    began = time.perf_counter()
    exchanges = await closed_loop(gateway.send, flags.concurrency, flags.requests)
    took_s = time.perf_counter() - began
    answers = [exchange.answer() for exchange in exchanges]  # read after the load: see client.py
    if errors := [answer.error for answer in answers if answer.error]:
        sys.exit(f"over HTTP: {errors[0]}")
    return took_s, [answer.said for answer in answers]


async def by_omni(omni: AsyncOmni, wish: PromptOptions, flags: argparse.Namespace) -> tuple[float, Said]:
    """Seconds that the load takes as one list of prompts, and what was said."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(flags.requests)]
    began = time.perf_counter()
    answers = await omni.generate(prompts, progress=False, **wish)
    took_s = time.perf_counter() - began
    if errors := [answer.error for answer in answers if answer.error]:
        sys.exit(f"by Omni: {errors[0]}")
    return took_s, [(answer.text, len(answer.audio.samples) if answer.audio else 0) for answer in answers]


async def measure(url: str, run_directory: Path, flags: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Seconds of each round (over HTTP, by Omni). The first round of each side warms up and does not count."""
    gateway = Gateway(url, Wish(flags.tokens, flags.frames, temperature=0.0, seed=0))
    talker = {"temperature": 0.0, "max_frames": flags.frames}
    wish: PromptOptions = {
        "speech": True,
        "temperature": 0.0,
        "seed": 0,
        "max_tokens": flags.tokens,
        "quartet": {"talker": talker},
    }
    http_s: list[float] = []
    omni_s: list[float] = []
    async with AsyncOmni(address=run_directory, concurrency=flags.concurrency) as omni:
        try:
            await gateway.facts()
            for i in range(flags.rounds + 1):
                sides = {"http": lambda: over_http(gateway, flags), "omni": lambda: by_omni(omni, wish, flags)}
                order = ["http", "omni"] if i % 2 else ["omni", "http"]
                done = {side: await sides[side]() for side in order}
                if done["http"][1] != done["omni"][1]:
                    sys.exit("the two sides did not say the same")
                if i:
                    http_s.append(done["http"][0])
                    omni_s.append(done["omni"][0])
        finally:
            await gateway.close()
    return http_s, omni_s


def main() -> None:
    """Prints requests a second of both sides, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64, help="of a round, on each side")
    parser.add_argument("--concurrency", type=int, default=16, help="requests at a time")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=40, help="most of an answer's text")
    parser.add_argument("--frames", type=int, default=60, help="most codec frames of an answer")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quartet-bench-") as scratch:
        model, run_directory = make_checkpoint(Path(scratch) / "model", 0, "tiny"), Path(scratch) / "run"
        options = LaunchOptions(str(model), port=free_ports(1)[0], run_directory=run_directory)
        with running(options) as stack:
            http_s, omni_s = asyncio.run(measure(stack.url, run_directory, flags))
    for name, seconds in (("HTTP", http_s), ("Omni", omni_s)):
        rates = sorted(flags.requests / each for each in seconds)
        console.print(f"{name}: {statistics.median(rates):.1f} requests/s (median; {rates[0]:.1f} to {rates[-1]:.1f})")
    ratios = sorted(ours / theirs for theirs, ours in zip(omni_s, http_s, strict=True))
    console.print(f"Omni over HTTP: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}, by rounds)")


if __name__ == "__main__":
    main()
