"""A batch beside live speech: time to first audio with and without it; then gateways are killed while it goes on."""

import argparse
import asyncio
import itertools
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.table import Table

from benchmarks.systems.gateways import GatewayProcess
from benchmarks.traffic.client import Exchange, Gateway, Wish
from benchmarks.traffic.load import PROMPTS, open_loop, poisson_arrivals

ENDPOINT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
WITHOUT, WITH = "without", "with"
_LOOK_S = 0.2
_GUARD_S = 1800.0


@dataclass
class Member:
    """A gateway of the service, and the file of its log."""

    process: GatewayProcess
    log: Path

    def began(self, batch_id: str) -> str:
        """When it began to work on the batch for the last time; "": never."""
        lines = (line for line in self.log.read_text().splitlines() if '"working on a batch"' in line)
        return max((entry["timestamp"] for entry in map(json.loads, lines) if entry["batch"] == batch_id), default="")


@dataclass
class Speech:
    """What live spoken answers took, in ms.

    Attributes:
        ttfa_ms: of all rounds, without and with a batch.
        lines_per_s: of the batch beside them, by round.
    """

    ttfa_ms: dict[str, list[float]] = field(default_factory=lambda: {WITHOUT: [], WITH: []})
    lines_per_s: list[float] = field(default_factory=list)


class Batch:
    """A batch of `count` chats; `url`: of a gateway, which may be another one each time."""

    def __init__(self, http: httpx.AsyncClient, batch_id: str) -> None:
        self._http, self.id = http, batch_id

    @classmethod
    async def create(cls, http: httpx.AsyncClient, url: str, count: int, tokens: int) -> "Batch":
        """Takes it to a gateway."""
        model = (await http.get(f"{url}/v1/models")).raise_for_status().json()["data"][0]["id"]
        lines = "\n".join(json.dumps(_line(number, model, tokens)) for number in range(count))
        form = {"purpose": (None, "batch"), "file": ("lines.jsonl", lines.encode())}
        file = (await http.post(f"{url}/v1/files", files=form)).raise_for_status().json()
        body = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
        return cls(http, (await http.post(f"{url}/v1/batches", json=body)).raise_for_status().json()["id"])

    async def now(self, url: str) -> dict[str, Any]:
        """OpenAI's object."""
        return (await self._http.get(f"{url}/v1/batches/{self.id}")).raise_for_status().json()

    async def until(self, url: str, more_than: float = math.inf) -> dict[str, Any]:
        """The object, once the batch has ended or more than so many lines are done."""
        async with asyncio.timeout(_GUARD_S):
            while (now := await self.now(url))["status"] not in ENDED:
                if now["request_counts"]["completed"] > more_than:
                    break
                await asyncio.sleep(_LOOK_S)
        return now

    async def cancel(self, url: str) -> None:
        """Returns when it has ended."""
        (await self._http.post(f"{url}/v1/batches/{self.id}/cancel")).raise_for_status()
        await self.until(url)

    async def results(self, url: str, file_id: str | None) -> list[str]:
        """The lines' own ids in a file of results."""
        if file_id is None:
            return []
        content = (await self._http.get(f"{url}/v1/files/{file_id}/content")).raise_for_status()
        return [json.loads(line)["custom_id"] for line in content.text.splitlines()]


def _line(number: int, model: str, tokens: int) -> dict[str, Any]:
    said = {"role": "user", "content": f"{PROMPTS[number % len(PROMPTS)]} Answer number {number}."}
    body = {"model": model, "messages": [said], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"custom_id": str(number), "method": "POST", "url": ENDPOINT, "body": body}


async def beside_speech(http: httpx.AsyncClient, members: list[Member], flags: argparse.Namespace) -> Speech:
    """Live spoken answers, round the gateways, in rounds with a batch and without."""
    speech, urls = Speech(), [member.process.url for member in members]
    clients = [Gateway(url, Wish(flags.text_tokens, flags.frames, 0.0, 0)) for url in urls]
    try:
        for client in clients:
            await client.facts()
            for prompt in PROMPTS:
                await client.send(prompt)  # warms up
        for number in range(flags.rounds):
            for side in (WITHOUT, WITH) if number % 2 else (WITH, WITHOUT):
                await _round(http, speech, clients, urls, side, number, flags)
    finally:
        for client in clients:
            await client.close()
    return speech


async def _round(
    http: httpx.AsyncClient,
    speech: Speech,
    clients: list[Gateway],
    urls: list[str],
    side: str,
    number: int,
    flags: argparse.Namespace,
) -> None:
    turn = itertools.cycle(clients)
    batch, first = None, 0
    if side == WITH:
        batch = await Batch.create(http, urls[number % len(urls)], flags.lines, flags.line_tokens)
        started = await batch.until(urls[0], more_than=0)
        first = started["request_counts"]["completed"]
    began_s = asyncio.get_running_loop().time()
    if flags.pause_s:
        exchanges = await _one_by_one(turn, flags, random.Random(number))
    else:
        arrivals_s = poisson_arrivals(flags.rate, flags.spoken, seed=number)
        exchanges = await open_loop(lambda prompt: next(turn).send(prompt), arrivals_s)
    took_s = asyncio.get_running_loop().time() - began_s
    for answer in (exchange.answer() for exchange in exchanges):
        if answer.error or not answer.audio:
            sys.exit(f"a spoken answer {side} a batch: {answer.error or 'has no audio'}")
        speech.ttfa_ms[side].append(1000 * (answer.audio[0][0] - answer.sent_s))
    if batch is not None:
        last = await batch.now(urls[0])
        if last["status"] != "in_progress":
            sys.exit(f"the batch ended before the round did ({last['status']}); give it more --lines or --line-tokens")
        speech.lines_per_s.append((last["request_counts"]["completed"] - first) / took_s)
        await batch.cancel(urls[0])


async def _one_by_one(turn: Iterator[Gateway], flags: argparse.Namespace, times: random.Random) -> list[Exchange]:
    """Answers that are alone with the batch, at moments that do not follow its steps."""
    exchanges = list[Exchange]()
    for number in range(flags.spoken):
        await asyncio.sleep(flags.pause_s * times.uniform(0.8, 1.2))
        exchanges.append(await next(turn).send(PROMPTS[number % len(PROMPTS)]))
    return exchanges


async def killed(
    http: httpx.AsyncClient, members: list[Member], start: Callable[[], Member], flags: argparse.Namespace
) -> dict[str, Any]:
    """A batch whose gateway is killed `flags.kills` times; each time `start` brings a new one. What it came to."""
    alive = list(members)
    batch = await Batch.create(http, alive[0].process.url, flags.lines, flags.line_tokens)
    done = 0
    for _ in range(flags.kills):
        if (await batch.until(alive[0].process.url, more_than=done))["status"] in ENDED:
            sys.exit("the batch ended before its gateways were killed; give it more --lines")
        holder = max(alive, key=lambda member: member.began(batch.id))
        holder.process.process.kill()
        await asyncio.to_thread(holder.process.process.wait)
        alive.remove(holder)
        alive.append(await asyncio.to_thread(start))
        done = (await batch.now(alive[0].process.url))["request_counts"]["completed"]
    url = alive[0].process.url
    ended = await batch.until(url)
    names = await batch.results(url, ended["output_file_id"]) + await batch.results(url, ended["error_file_id"])
    if sorted(names, key=int) != [str(number) for number in range(flags.lines)]:
        sys.exit(f"the batch is not whole: {len(names)} results, {len(set(names))} lines of {flags.lines}")
    return ended


def report(speech: Speech) -> Table:
    """Quantiles without a batch and with one."""
    table = Table("live spoken answers", "without a batch", "with a batch", "ratio")
    cuts = {side: statistics.quantiles(times, n=20, method="inclusive") for side, times in speech.ttfa_ms.items()}
    for name, cut in (("TTFA ms p50", 9), ("TTFA ms p95", 18)):
        without, beside = cuts[WITHOUT][cut], cuts[WITH][cut]
        table.add_row(name, f"{without:.1f}", f"{beside:.1f}", f"{beside / without:.3f}")
    table.add_row("lines of the batch a second", "", f"{statistics.median(speech.lines_per_s):.1f}", "")
    return table
