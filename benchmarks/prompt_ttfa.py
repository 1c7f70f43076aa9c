"""Time to the first audio of a long prompt of pictures, by each transport between the stages.

The states of the pictures' positions go from the thinker to the talker, as wide as those of the published model: 2,560
positions of 2,048 float32 are 20 MiB. A system is started for each transport, one after the other; no two requests
share a picture, so none is answered from a cache.
"""

import argparse
import asyncio
import base64
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from holdings import sent_bytes
from PIL import Image

from cli.plan import PIPELINE, Options
from cli.supervisor import free_ports
from cli.tiny import make_checkpoint
from cli.up import console, running

TRANSPORTS = {
    "inline": ["--transports=inline"],
    "shared_memory": ["--transports=inline,shared_memory"],
    "ucx": ["--transports=inline,ucx"],
}
SIDE, TOKENS = 512, 256  # of a picture: its pixels a side, and its positions in the prompt
STAGES = ("thinker", "talker", "code2wav")


def picture(noise: np.random.Generator) -> dict[str, Any]:
    """A part of a message: a picture that nobody has seen."""
    data = io.BytesIO()
    Image.fromarray(noise.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)).save(data, "PNG", compress_level=1)
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def bodies(pictures: int) -> Iterator[dict[str, Any]]:
    """Requests, each with other pictures."""
    noise = np.random.default_rng(0)
    while True:
        content = [*(picture(noise) for _ in range(pictures)), {"type": "text", "text": "What do you see?"}]
        yield {
            "messages": [{"role": "user", "content": content}],
            "modalities": ["text", "audio"],
            "audio": {"format": "pcm16"},
            "stream": True,
            "temperature": 0,
            "max_tokens": 8,
            "quartet": {"talker": {"temperature": 0, "max_frames": 8}},
        }


async def ttfa_s(client: httpx.AsyncClient, body: dict[str, Any]) -> float:
    """Seconds from sending `body` to the first piece of audio."""
    sent_s, first_s = time.perf_counter(), 0.0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if response.status_code != 200 or '"error"' in line:
                sys.exit(f"{response.status_code}: {line[:500]}")
            if not first_s and '"data"' in line:
                first_s = time.perf_counter()
    return first_s - sent_s


async def measure(url: str, flags: argparse.Namespace) -> list[float]:
    """TTFA in seconds of `flags.requests` requests, one after another."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        asked = bodies(flags.pictures)
        seconds = []
        for i in range(flags.requests + 2):
            took_s = await ttfa_s(client, next(asked) | {"model": model})
            if i >= 2:  # what came before was the warm-up
                seconds.append(took_s)
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=10, help=f"in a prompt; {TOKENS} positions each")
    parser.add_argument("--requests", type=int, default=10, help="by each transport")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quartet-ttfa-") as scratch:
        model = make_checkpoint(Path(scratch) / "wide", seed=0, size="wide")
        print(f"prompts of {flags.pictures * TOKENS} positions of pictures, {flags.requests} requests")
        print("| transport | TTFA p50 | fastest | MiB a request from thinker to talker |\n|---|---|---|---|")
        for transport, settings in TRANSPORTS.items():
            run_directory = Path(scratch) / transport
            arguments = {"thinker": [*settings, "--max-context-tokens=8192"], "talker": settings, "code2wav": settings}
            options = Options(str(model), "127.0.0.1", free_ports(1)[0], PIPELINE, run_directory, arguments)
            with running(options) as stack:
                console.print(transport)
                seconds = asyncio.run(measure(stack.url, flags))
                sent = sent_bytes(run_directory, "thinker")
            each = ", ".join(f"{by} {size_bytes / (flags.requests + 2) / 2**20:.1f}" for by, size_bytes in sent.items())
            print(f"| {transport} | {statistics.median(seconds):.3f} s | {min(seconds):.3f} s | {each} |", flush=True)


if __name__ == "__main__":
    main()
