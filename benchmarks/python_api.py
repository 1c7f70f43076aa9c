"""Prompts by `quartet.Omni` beside the same prompts over HTTP: the same stages, the same answers, in turns.

Each side answers a list of prompts, so many at a time; prompts a second is what counts. See docs/benchmarks.md.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from load import PROMPTS
from speech import console, target

from quartet import Omni


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, help="of a `quartet up` on this machine; default: starts a system")
    parser.add_argument("--model", type=Path, help="checkpoint directory to start; default: a new `quartet tiny`")
    parser.add_argument("--flag", action="append", default=[], metavar="STAGE.SETTING=VALUE", help="may be repeated")
    parser.add_argument("--prompts", type=int, default=128, help="of each side in each round")
    parser.add_argument("--concurrency", type=int, default=32, help="prompts at a time")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--frames", type=int, default=0, help="codec frames of each answer; 0: text alone")
    parser.add_argument("--rounds", type=int, default=5, help="of both sides, in turns; a first one does not count")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.set_defaults(url=None)
    return parser.parse_args(arguments)


def asked(options: argparse.Namespace) -> dict[str, Any]:
    """What every prompt asks for: a greedy answer of one length."""
    text = {"temperature": 0, "max_tokens": options.tokens, "ignore_eos": True}
    talker = {"temperature": 0, "max_frames": options.frames}
    return text | ({"modalities": ["text", "audio"], "quartet": {"talker": talker}} if options.frames else {})


async def over_http(url: str, prompts: Sequence[str], options: argparse.Namespace) -> list[str]:
    """The answers' texts, by whole answers of the HTTP API."""
    slots = asyncio.Semaphore(options.concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]

        async def answer(prompt: str) -> str:
            body = {"model": model, "messages": [{"role": "user", "content": prompt}], **asked(options)}
            async with slots:
                response = (await client.post("/v1/chat/completions", json=body)).raise_for_status()
            return response.json()["choices"][0]["message"]["content"]

        return await asyncio.gather(*map(answer, prompts))


def by_omni(omni: Omni, prompts: Sequence[str], options: argparse.Namespace) -> list[str]:
    """The answers' texts, by one list of prompts."""
    members = {name: value for name, value in asked(options).items() if name != "modalities"}
    answers = omni.generate(list(prompts), speech=bool(options.frames), progress=False, **members)
    for answer in answers:
        if answer.error is not None:
            raise answer.error
    return [answer.text for answer in answers]


def timed(work: Callable[[], list[str]]) -> tuple[float, list[str]]:
    """(seconds, result) of `work`."""
    begun = time.perf_counter()
    made = work()
    return time.perf_counter() - begun, made


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints prompts a second of both sides and their ratio. Raises SystemExit: the sides' answers differ."""
    options = parse(arguments)
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(options.prompts)]
    with tempfile.TemporaryDirectory() as scratch, target(options, Path(scratch)) as system:
        stages = options.run_dir or Path(scratch) / "run"
        with Omni(address=stages, concurrency=options.concurrency) as omni:
            sides = {
                "HTTP": lambda: asyncio.run(over_http(system.url, prompts, options)),
                "Omni": lambda: by_omni(omni, prompts, options),
            }
            took_s: dict[str, list[float]] = {name: [] for name in sides}
            for number in range(options.rounds + 1):
                answers = {}
                for name in sides if number % 2 else reversed(sides):
                    round_s, answers[name] = timed(sides[name])
                    took_s[name] += [round_s] if number else []
                    console.print(f"round {number}: {name} {options.prompts / round_s:.1f} prompts/s")
                if options.concurrency == 1 and answers["HTTP"] != answers["Omni"]:
                    raise SystemExit("the sides' answers differ")  # beyond one at a time, batches round differently
    rates = {name: options.prompts / statistics.median(each) for name, each in took_s.items()}
    ratios = [http / ours for http, ours in zip(took_s["HTTP"], took_s["Omni"], strict=True)]
    console.print(
        f"prompts/s: HTTP {rates['HTTP']:.1f}, Omni {rates['Omni']:.1f}; "
        f"Omni / HTTP: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}"
    )
    if options.json:
        options.json.write_text(json.dumps({"took_s": took_s, "prompts_per_s": rates, "ratios": ratios}, indent=1))


if __name__ == "__main__":
    main()
