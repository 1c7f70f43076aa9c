"""Time to the first audio of a long prompt of images, by each transport between the stages.

The states of the images' positions go from the thinker to the talker, as wide as those of the published model: 2,560
positions of 2,048 float32 are 20 MiB. A system is started for each transport, one after the other; no two requests
share an image, so none is answered from a cache.
"""

import argparse
import asyncio
import base64
import io
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.systems.holdings import sent_bytes
from benchmarks.traffic.client import Gateway, Wish
from cli.plan import PIPELINE, LaunchOptions
from cli.supervisor import free_ports
from cli.tiny import make_checkpoint
from cli.up import console, running

TRANSPORTS = {
    "inline": ["--transports=inline"],
    "shared_memory": ["--transports=inline,shared_memory"],
    "ucx": ["--transports=inline,ucx"],
}
SIDE, TOKENS = 512, 256  # of a picture: its pixels a side, and its positions in the prompt
WARM_UP = 2  # requests that do not count


def picture(noise: np.random.Generator) -> dict[str, Any]:
    """Returns a part of a message with a new image."""
    data = io.BytesIO()
    Image.fromarray(noise.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)).save(data, "PNG", compress_level=1)
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


async def measure(url: str, flags: argparse.Namespace) -> list[float]:
    """TTFA in seconds of `flags.requests` requests, one after another, each with other images."""
    noise, seconds = np.random.default_rng(0), []
    gateway = Gateway(url, Wish(tokens=8, frames=8, temperature=0.0, seed=0))
    try:
        await gateway.facts()
        for i in range(flags.requests + WARM_UP):
            parts = [*(picture(noise) for _ in range(flags.pictures)), {"type": "text", "text": "What do you see?"}]
            answer = (await gateway.send(parts)).answer()
            if answer.error or not answer.audio:
                sys.exit(f"request {i}: {answer.error or 'no audio'}")
            if i >= WARM_UP:
                seconds.append(answer.audio[0][0] - answer.sent_s)
    finally:
        await gateway.close()
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
            options = LaunchOptions(str(model), "127.0.0.1", free_ports(1)[0], PIPELINE, run_directory, arguments)
            with running(options) as stack:
                console.print(transport)
                seconds = asyncio.run(measure(stack.url, flags))
                sent = sent_bytes(run_directory, "thinker")
            each = ", ".join(
                f"{by} {size_bytes / (flags.requests + WARM_UP) / 2**20:.1f}" for by, size_bytes in sent.items()
            )
            print(f"| {transport} | {statistics.median(seconds):.3f} s | {min(seconds):.3f} s | {each} |", flush=True)


if __name__ == "__main__":
    main()
