"""Frames on their way into code2wav's engine."""

import random
from collections.abc import Sequence

import torch

from services.code2wav.engine import DecodeEngine
from services.code2wav.stream import Stream


def feed_in_pieces(
    engine: DecodeEngine, streams: Sequence[Stream], codes: Sequence[torch.Tensor], rng: random.Random, most: int
) -> None:
    """Puts the frames of each stream, (frames, groups), in pieces of 1 to `most`, in a random order of the streams, and
    finishes each."""
    left = dict(enumerate(codes))
    while left:
        i = rng.choice(list(left))
        count = rng.randint(1, most)
        engine.put(streams[i], left[i][:count])
        left[i] = left[i][count:]
        if not len(left[i]):
            engine.finish(streams[i])
            del left[i]
