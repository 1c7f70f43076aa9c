"""A small BAGEL in two processes: an encoder reads what a request says, and a dit makes the picture of it."""

import asyncio
import base64
import contextlib
import io
import json
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import psutil
from PIL import Image

from gateway.pipelines import SHIPPED
from tests.support.memory import counted, in_use
from tests.support.systems.gateway import NOT_FOR_CLIENTS
from tests.support.systems.stack import HANG_GUARD_S, Stack, running, until
from tests.support.weights.checkpoints import diffusion_checkpoint

GENERATIONS, EDITS = "/v1/images/generations", "/v1/images/edits"
STAGES = ("encoder", "dit")
QUICK: dict[str, Any] = {"size": "64x64", "num_inference_steps": 3, "seed": 3}
LONG: dict[str, Any] = {"size": "192x192", "num_inference_steps": 200, "seed": 3}  # a second and more of steps
HELD = (
    "quartet_requests_in_flight",
    "quartet_requests_running",
    "quartet_requests_queued",
    "quartet_dit_outputs_running",
    "quartet_dit_outputs_waiting",
    "quartet_stream_positions_pending",
    "quartet_stream_credits_outstanding",
    "quartet_shared_memory_used_bytes",
)
"""Gauges of what requests hold, which are 0 without requests."""


def thinks(tokens: int) -> dict[str, Any]:
    """Members of a request for a plan of that many tokens: each takes the encoder a millisecond or so."""
    return {"quartet": {"dit": {"arguments": {"think": True, "max_think_tokens": tokens}}}}


def picture_file() -> bytes:
    """A PNG of 64x64 pixels, for edits."""
    file = io.BytesIO()
    Image.linear_gradient("L").resize((64, 64)).convert("RGB").save(file, "PNG")
    return file.getvalue()


def parts_of(body: dict[str, Any]) -> dict[str, Any]:
    """Arguments of httpx for a request: one with a member `image`, a file, is an edit."""
    if "image" not in body:
        return {"url": GENERATIONS, "json": body}
    fields = {
        name: json.dumps(value) if isinstance(value, dict) else str(value)
        for name, value in body.items()
        if name != "image"
    }
    return {"url": EDITS, "data": fields, "files": {"image": ("a.png", body["image"], "image/png")}}


def picture(answer: httpx.Response) -> np.ndarray:
    """(height, width, 3) uint8 of an answer's only picture."""
    assert answer.status_code == 200, answer.text
    (made,) = answer.json()["data"]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(made["b64_json"]))).convert("RGB"))


def held(system: Stack, stages: Sequence[str]) -> dict[str, float]:
    """What requests hold in the stages, by stage and gauge, without zeros."""
    pages = {stage: system.page(stage) for stage in stages}
    found = {f"{stage} {gauge}": page.total(gauge) or 0.0 for stage, page in pages.items() for gauge in HELD}
    return {name: value for name, value in found.items() if value}


class HandedOver:
    """The running system. `arenas`: the directory of its shared memory; None: tensors go inline."""

    def __init__(self, system: Stack, arenas: Path | None) -> None:
        self.system, self.arenas = system, arenas

    def ask(self, body: dict[str, Any]) -> httpx.Response:
        return self.system.http.post(**parts_of(body))

    def answered(self, body: dict[str, Any]) -> tuple[float, httpx.Response]:
        """(when it came by the monotonic clock, the answer)."""
        answer = self.ask(body)
        return time.monotonic(), answer

    def held(self) -> dict[str, float]:
        return held(self.system, STAGES)

    def wait_until_nothing_is_held(self) -> None:
        until(lambda: not self.held(), "no request holds anything")

    @property
    def arena_files(self) -> int:
        return len(list(self.arenas.iterdir())) if self.arenas else 0

    def transport(self) -> str:
        """By which all tensors have gone so far."""
        (used,) = [name for name, size_bytes in self.system.sent_bytes("encoder").items() if size_bytes]
        return used


@contextlib.contextmanager
def handing_over(directory: Path, shared_memory: bool, cache_mib: int = 0) -> Iterator[HandedOver]:
    """The system around a block. With `shared_memory` every tensor goes there, however small, else all go inline.
    `cache_mib`: of encodings; without it each request is read anew."""
    flags = [
        f"--gateway-arg=--jobs-dir={directory / 'jobs'}",
        f"--pipeline={SHIPPED / 'glm-image.yaml'}",
        f"--encoder-arg=--encoding-cache-mib={cache_mib}",
    ]
    with contextlib.ExitStack() as exits:
        exits.enter_context(counted())
        arenas = None
        if shared_memory:
            arenas = Path(exits.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="arenas-")))
            flags += [f"--{stage}-arg=--shared-memory-dir={arenas}" for stage in STAGES]
            flags += ["--encoder-arg=--shared-memory-mib=64", "--encoder-arg=--large-tensor-bytes=1"]
        else:
            flags.append("--dit-arg=--transports=inline")
        system = exits.enter_context(running(diffusion_checkpoint("bagel"), directory / "run", *flags))
        yield HandedOver(system, arenas)


HEARD_WITHIN_S = 1.0  # of the death; nothing that a stage waits for by itself ends as early
ABORTS = 100
MIB = 2**20
MORE_RESIDENT_BYTES, MORE_MALLOC_BYTES, MORE_BLOCKS = 32 * MIB, 2 * MIB, 5_000
"""What the second half of the aborts may add to a process. A context that stays takes 15 KiB and more. The
resident size also has pages that an allocator keeps."""
LEVELS = 1  # of 255, by which a picture may differ that was made among others: they share steps
HONEST: list[dict[str, Any]] = [
    QUICK | {"prompt": "a red fox"},
    QUICK | {"prompt": "make it blue", "image": picture_file()},
    QUICK | {"prompt": "a boat"} | thinks(20),
]
"""Requests whose client stays."""


def check_error(answer: httpx.Response, stage: str) -> None:
    """A typed error that blames `stage`, and says no more."""
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("service_unavailable_error", "stage_unavailable")
    assert error["message"] == f"the {stage} went away while it answered; try again in 1 s"
    assert not NOT_FOR_CLIENTS.search(answer.text)


def check_all_is_back(pair: HandedOver) -> None:
    """After a death, and the start that follows."""
    until(pair.system.ready, "both stages serve again")
    pair.wait_until_nothing_is_held()
    assert pair.arena_files == (pair.arenas is not None)  # the new encoder's, or that of the one that lives


class ProcessSize(NamedTuple):
    """Of a process. `malloc_bytes`, `blocks`: of what is in use, after a full collection."""

    resident_bytes: int
    malloc_bytes: int
    blocks: int


async def check_aborts(pair: HandedOver, chance: random.Random) -> None:
    """A hundred clients leave. One that stays gets its pictures meanwhile, and afterwards nothing is held."""
    files, wanted = pair.arena_files, [picture(pair.ask(body)) for body in HONEST]
    cancelled = {stage: pair.system.cancelled(stage) for stage in STAGES}
    sizes: list[dict[str, ProcessSize]] = []
    for _ in range(2):
        requests = [draw(chance) for _ in range(ABORTS // 2)]
        left, made = await abort_beside(pair, requests)
        assert left == len(requests)
        for i, each in enumerate(made):
            assert abs(each.astype(int) - wanted[i % len(HONEST)]).max() <= LEVELS
        await asyncio.to_thread(pair.wait_until_nothing_is_held)
        sizes.append({stage: await size_of(pair.system.pid(stage)) for stage in STAGES})
    assert pair.arena_files == files
    for body, before in zip(HONEST, wanted, strict=True):
        assert np.array_equal(picture(pair.ask(body)), before)
    for stage in STAGES:
        assert pair.system.cancelled(stage) > cancelled[stage]
        before, after = (size[stage] for size in sizes)
        assert after.resident_bytes - before.resident_bytes < MORE_RESIDENT_BYTES, (stage, before, after)
        assert after.malloc_bytes - before.malloc_bytes < MORE_MALLOC_BYTES, (stage, before, after)
        assert after.blocks - before.blocks < MORE_BLOCKS, (stage, before, after)


async def size_of(pid: int) -> ProcessSize:
    used = await in_use(pid)
    return ProcessSize(psutil.Process(pid).memory_info().rss, used.malloc_bytes, used.blocks)


async def abort_beside(pair: HandedOver, requests: list[tuple[dict[str, Any], float]]) -> tuple[int, list[np.ndarray]]:
    """(how many of `requests` were left, the pictures of HONEST, in turns, of a client that stays meanwhile)."""
    ends, made = threading.Event(), list[np.ndarray]()

    def stay() -> None:
        while not ends.is_set() or len(made) < len(HONEST):
            made.append(picture(pair.ask(HONEST[len(made) % len(HONEST)])))

    staying = asyncio.create_task(asyncio.to_thread(stay))
    try:
        left = await abort(pair.system.url, requests, at_a_time=4)
    finally:
        ends.set()
        await staying
    return left, made


def draw(chance: random.Random) -> tuple[dict[str, Any], float]:
    """A request that takes a second and more, and how long (s) its client stays."""
    kind = chance.choice(("text", "edit", "thinks"))
    body = LONG | {"prompt": f"a {chance.choice(('red', 'blue'))} fox, {chance.randrange(20)}"}
    if kind == "edit":
        body |= {"image": picture_file()}
    elif kind == "thinks":
        body |= thinks(900)
    # a text is read in 30 ms or so; and then there is a second of steps
    return body, chance.uniform(0.0, chance.choice((0.05, 0.15, 0.6)))


async def abort(url: str, requests: list[tuple[dict[str, Any], float]], at_a_time: int) -> int:
    """Sends each request and leaves after its time. Returns how many were left before they had an answer."""
    places, left = asyncio.Semaphore(at_a_time), 0

    async def one(body: dict[str, Any], stays_s: float) -> None:
        nonlocal left
        # a connection of its own, which ends with it
        async with places, httpx.AsyncClient(base_url=url, timeout=HANG_GUARD_S, verify=False) as client:
            try:
                await asyncio.wait_for(client.post(**parts_of(body)), stays_s)
            except TimeoutError:
                left += 1

    await asyncio.gather(*(one(*each) for each in requests))
    return left
