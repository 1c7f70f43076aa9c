"""Prints what a step costs: `python -m benchmarks.code2wav_steps MODEL [threads]`. Where `ChunkPolicy`'s figures
come from."""

import argparse
import statistics
import time

import torch

from services.code2wav.family import Decoder, load_decoder
from services.common.engine.process import keep_freed_memory

FRAMES, STREAMS = (1, 2, 4, 8, 16, 25), (1, 8, 32)
SECONDS_EACH = 0.5


def step_ms(decoder: Decoder, streams: int, frames: int) -> float:
    """Milliseconds of a step in the middle of streams: the fastest tenth of those that fit into SECONDS_EACH."""
    states = decoder.new_states(streams)
    slots = [slot for _ in range(streams) if (slot := states.acquire()) is not None]
    codes = torch.zeros(streams, frames, decoder.spec.num_code_groups, dtype=torch.int64)
    codes = codes.to(decoder.device)
    times_ms: list[float] = []
    end = time.perf_counter() + SECONDS_EACH
    while len(times_ms) < 10 or time.perf_counter() < end:
        began = time.perf_counter()
        decoder.step(codes, states.batch(slots))
        times_ms.append((time.perf_counter() - began) * 1000)
    return statistics.quantiles(times_ms, n=10)[0]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a checkpoint with a code2wav")
    parser.add_argument("threads", type=int, nargs="?", default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    loaded = load_decoder(options.model)
    print("ms per frame of audio, by frames of each stream", *FRAMES, sep="\t")
    for count in STREAMS:
        print(f"{count} streams", *(f"{step_ms(loaded, count, n) / n / count:.2f}" for n in FRAMES), sep="\t")


if __name__ == "__main__":
    main()
