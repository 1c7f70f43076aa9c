"""`POST /v1/audio/speech` beside the model's own library on the same weights and texts (`make bench-speak`).

Closed loops at given concurrencies, by a talker and a code2wav alone. Quartet is compared with the peer's calls one
after another and, above one at a time, with one call for as many texts. docs/benchmarks.md defines every figure.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.peers import speak as peer
from benchmarks.peers.chat import in_line
from benchmarks.speech import Run, console, load_gateway, target, write_json
from benchmarks.traffic.answer import Answer, Prompt
from benchmarks.traffic.client import PCM16_BYTES, Exchange
from benchmarks.traffic.figures import figures
from benchmarks.traffic.load import PROMPTS
from benchmarks.traffic.report import show
from cli.plan import LaunchError
from gateway.pipelines import SHIPPED

MOST_APART = 2  # steps of PCM16 between sides that say the same: float32 sums in another order

Sounds = dict[Prompt, list[np.ndarray]]
"""Of each text, what each answer sounded like: (samples,) int16."""


@dataclass(frozen=True)
class SpeechWish:
    """Parameters of every request: greedy speech of at most so many codec frames."""

    frames: int
    path = "/v1/audio/speech"

    def body(self, model: str, prompt: Prompt) -> dict[str, Any]:
        """Body of the POST."""
        talker = {"temperature": 0, "max_frames": self.frames}
        return {"model": model, "input": prompt, "response_format": "pcm", "quartet": {"talker": talker}}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, help="of a `quartet up` on this machine; default: starts a system")
    parser.add_argument("--model", type=Path, help="checkpoint directory; default: a new `quartet tiny`")
    parser.add_argument("--arch", default="qwen3-omni", help="of that `quartet tiny` (qwen3-omni), or qwen3-tts")
    parser.add_argument("--flag", action="append", default=[], metavar="STAGE.SETTING=VALUE", help="may be repeated")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8], help="of the closed loops (1 8)")
    parser.add_argument("--requests", type=int, help="of each closed loop; default: 12 a worker, at least 16")
    parser.add_argument("--frames", type=int, default=60, help="most codec frames a request")
    parser.add_argument("--no-peer", action="store_true", help="leave the model's own library out")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has the model's own library")
    parser.add_argument("--peer-requests", type=int, default=16, help="texts that count of it")
    parser.add_argument("--peer-threads", type=int, default=os.cpu_count(), help="its OpenMP threads (all cores)")
    parser.add_argument("--json", type=Path, help="write all figures and every request here")
    parser.set_defaults(url=None, rate=None, load=0.0)  # no open loop
    options = parser.parse_args(arguments)
    if min(options.concurrency) < 1:
        parser.error("--concurrency: must be 1 or more")
    return options


def spoken(exchange: Exchange, sounds: Sounds) -> Answer:
    """Reads a response of plain samples, and adds them to `sounds`."""
    answer = Answer(exchange.prompt, exchange.sent_s, exchange.done_s, error=exchange.error)
    body = b"".join(piece for _, piece in exchange.pieces)
    if answer.error is None and exchange.status != 200:
        answer.error = f"{exchange.status}: {body.decode(errors='replace')}"
    if answer.error is None:
        ends = np.cumsum([len(piece) for _, piece in exchange.pieces]) // PCM16_BYTES
        samples = np.diff(ends, prepend=0).tolist()
        answer.audio = [(came_s, count) for (came_s, _), count in zip(exchange.pieces, samples, strict=True)]
        sounds.setdefault(exchange.prompt, []).append(np.frombuffer(body, "<i2"))
    return answer


def ask_peer(model: Path, runs: Sequence[Run], options: argparse.Namespace, facts: dict[str, Any], sounds: Sounds):
    """Has the peer say the same, text by text and as a batch of each concurrency, and adds its figures to the loads.

    Raises:
        SystemExit: the two sides did not say the same.
    """
    name, rate_hz = peer.PEERS[peer.family(model)][0], facts["sample_rate_hz"]
    sizes = [size for run in runs if (size := run.load.concurrency or 1) > 1]
    texts = [PROMPTS[i % len(PROMPTS)] for i in range(max(sizes, default=1) + options.peer_requests)]
    calls = [[text] for text in texts] + [[PROMPTS[i % len(PROMPTS)] for i in range(size)] for size in sizes]
    console.print(f"{name}: {len(texts)} calls of one text{''.join(f', one of {size}' for size in sizes)}")
    asked = (options.peer_python, model, facts["voices"][0], calls, options.frames, options.peer_threads)
    made = peer.ask(*asked)
    require_same(sounds, made)
    alone = [_answers(call)[0] for call in made[: len(texts)]]
    batches = {len(call.texts): call for call in made[len(texts) :]}
    for run in runs:
        load, concurrency = run.load, run.load.concurrency or 1
        run.peer_answers = in_line(alone, concurrency)
        load.peer, load.peer_name = figures(run.peer_answers, rate_hz), f"{name}, one after another"
        # Its calls never overlap, so its throughput does not depend on how many wait.
        busy_s = alone[-1].done_s - alone[0].sent_s
        load.peer.audio_s_per_s = sum(answer.samples for answer in alone) / rate_hz / busy_s
        load.peer.cpu_s_per_request = {name: sum(call.cpu_s for call in made[: len(texts)]) / len(texts)}
        if batch := batches.get(concurrency):
            told = figures(_answers(batch), rate_hz)
            load.third = {figure: spread["p50"] for figure, spread in told.spreads.items()}
            load.third |= {"audio_s_per_s": told.audio_s_per_s, "cpu_s": batch.cpu_s / concurrency}
            load.third_name = f"{name}, one call for {concurrency}"


def _answers(call: peer.Call) -> list[Answer]:
    told = zip(call.texts, call.sounds, strict=True)
    return [Answer(text, call.sent_s, call.done_s, audio=[(call.done_s, len(sound))]) for text, sound in told]


def require_same(sounds: Sounds, calls: Sequence[peer.Call]) -> None:
    """Raises SystemExit: a text sounds otherwise in one of the peer's `calls`."""
    for call in calls:
        for text, theirs in zip(call.texts, call.sounds, strict=True):
            for ours in sounds.get(text, []):
                if len(ours) != len(theirs) or np.abs(ours.astype(int) - theirs).max(initial=0) > MOST_APART:
                    sys.exit(f"no figures, for the sides said {text!r} differently ({len(call.texts)} in the call)")


def main() -> None:
    options, sounds = parse(), Sounds()
    with tempfile.TemporaryDirectory(prefix="quartet-bench-") as scratch:
        try:
            with target(options, Path(scratch), SHIPPED / "speech.yaml", options.arch) as at:
                wish, read = SpeechWish(options.frames), partial(spoken, sounds=sounds)
                runs, facts = asyncio.run(load_gateway(at, options, wish, read))
        except (LaunchError, httpx.HTTPError) as error:
            sys.exit(f"{type(error).__name__}: {error}")
        if options.no_peer or at.model is None or peer.family(at.model) not in peer.PEERS:
            console.print("the peer is left out: it needs --model of a family in peers/speak.py and no --no-peer")
        else:
            ask_peer(at.model, runs, options, facts, sounds)
    show(console, [run.load for run in runs])
    if options.json:
        write_json(options.json, options, runs)
    if any(run.load.quartet.failed for run in runs):
        sys.exit("some requests failed; their errors are above")


if __name__ == "__main__":
    main()
