"""How far an aligner's word times are from those that espeak-ng made the speech with.

    python -m benchmarks.word_times [--model DIR_OR_ID] [--minutes 10] [--json FILE]

The text is the repository's LICENSE, sentence by sentence, which no aligner here was trained with; the voices are
espeak-ng's variants that `training/` holds out. A request is a sentence. Beside the model, a text whose words share its
speech by their letters is measured: what a client can do that knows only where speech begins and ends.
"""

import argparse
import asyncio
import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from services.aligner.config import AlignerSettings
from services.aligner.engine import AlignerEngine, load_engine
from services.aligner.family import RATE_HZ, Sound, WordTimes
from services.aligner.words import WordPlace, places
from services.demo_models import ALIGNER
from training.aligner import spoken_words
from training.espeak import Utterance, say
from training.hearing import draw_voice

LICENSE = Path(__file__).parents[1] / "LICENSE"
MOST_CHARACTERS = 300  # of a sentence: about 20 s
PADDING_S = 0.2  # of silence around a sentence, as around a window of a transcription
PARALLEL = 4  # requests at a time


@dataclass(frozen=True)
class Spoken:
    """A sentence in 16-bit samples, and the true times of its words in seconds; None where espeak-ng has none: it says
    some pairs of words, such as "of the", as one."""

    text: str
    samples: np.ndarray
    begins: Sequence[float | None]
    ends: Sequence[float | None]


@dataclass(frozen=True)
class Errors:
    """Absolute errors in milliseconds, of begins and ends together."""

    median: float
    p95: float
    largest: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> "Errors":
        return cls(*(round(float(np.percentile(errors, part)), 1) for part in (50, 95, 100)))


def sentences() -> list[str]:
    """Of the license: without the marks of its lists, and not too long."""
    text = re.sub(r"\s+", " ", re.sub(r"\[[^]]*\]|https?://\S+|[^A-Za-z0-9' .,;:-]", " ", LICENSE.read_text()))
    parts = re.split(r"(?<=[.;:])\s", text)
    pieces = (piece for part in parts for piece in _pieces(part))
    return [piece.strip() for piece in pieces if len(piece.split()) > 2]


def _pieces(part: str) -> Iterator[str]:
    """Parts of at most MOST_CHARACTERS, cut at commas."""
    piece = ""
    for clause in re.split(r"(?<=,)\s", part):
        if piece and len(piece) + len(clause) > MOST_CHARACTERS:
            yield piece
            piece = ""
        piece = f"{piece} {clause}"
    yield piece


def speech(engine: AlignerEngine, minutes: float, seed: int = 0) -> Iterator[Spoken]:
    """Sentences, over and over in other voices, until they last so long."""
    draw, left = random.Random(seed), minutes * 60
    while True:
        for text in sentences():
            spoken = say(text, draw_voice(draw, held_out=True), RATE_HZ)
            before = int(PADDING_S * RATE_HZ)
            samples = (np.pad(spoken.samples, before) * 32767).astype(np.int16)
            yield Spoken(text, samples, *_true_times(text, spoken, places(text, engine.model.split(text, "en"))))
            left -= len(spoken.samples) / RATE_HZ
            if left <= 0:
                return


def _true_times(
    text: str, spoken: Utterance, where: Sequence[WordPlace]
) -> tuple[list[float | None], list[float | None]]:
    """Begins and ends of the words at `where`. espeak-ng says a word in several parts, or several words in one."""
    said = spoken_words(text, spoken)
    parts = [[each for each in said if begin <= each.text_at < end] for begin, end in where]
    begins: list[float | None] = [each[0].begin / RATE_HZ + PADDING_S if each else None for each in parts]
    ends: list[float | None] = [each[-1].end / RATE_HZ + PADDING_S if each else None for each in parts]
    for i, (_, following) in enumerate(pairwise(parts)):
        if not following:  # its end is that of both
            ends[i] = None
    return begins, ends


async def aligned(engine: AlignerEngine, spoken: Sequence[Spoken]) -> list[list[WordTimes]]:
    places_left = asyncio.Semaphore(PARALLEL)

    async def one(each: Spoken) -> list[WordTimes]:
        async with places_left:
            samples = each.samples.astype(np.float32) / 32768
            return await engine.align(Sound(samples, engine.model.split(each.text, "en"), "en"))

    return await asyncio.gather(*map(one, spoken))


def by_letters(spoken: Spoken, words: Sequence[str]) -> list[WordTimes]:
    """Each word's share of the speech is that of its letters."""
    length = len(spoken.samples) / RATE_HZ - 2 * PADDING_S
    edges = np.cumsum([0, *(len(word) + 1 for word in words)]) / sum(len(word) + 1 for word in words)
    at = [round((PADDING_S + edge * length) * 1000) for edge in edges]
    return [WordTimes(*each) for each in pairwise(at)]


def errors(spoken: Sequence[Spoken], found: Sequence[Sequence[WordTimes]]) -> list[float]:
    """Milliseconds, of all begins and ends that are known."""
    missed = list[float]()
    for each, times in zip(spoken, found, strict=True):
        for begin, end, word in zip(each.begins, each.ends, times, strict=True):
            missed += [abs(begin * 1000 - word.begin_ms)] if begin is not None else []
            missed += [abs(end * 1000 - word.end_ms)] if end is not None else []
    return missed


def measure(model: str, minutes: float) -> dict[str, object]:
    """Figures of an aligner's checkpoint. Raises ValueError: it cannot be used."""
    engine = load_engine(AlignerSettings(model=model, device="cpu"))
    spoken = list(speech(engine, minutes))
    begun = time.monotonic()
    found = asyncio.run(aligned(engine, spoken))
    took_s = time.monotonic() - begun
    engine.close()
    words = [engine.model.split(each.text, "en") for each in spoken]
    shared = [by_letters(each, split) for each, split in zip(spoken, words, strict=True)]
    audio_s = sum(len(each.samples) for each in spoken) / RATE_HZ
    return {
        "model": Path(model).name,
        "minutes": round(audio_s / 60, 2),
        "sentences": len(spoken),
        "words": sum(map(len, words)),
        "times compared": len(errors(spoken, found)),
        "aligner, ms": vars(Errors.of(errors(spoken, found))),
        "by letters, ms": vars(Errors.of(errors(spoken, shared))),
        "seconds of speech a second": round(audio_s / took_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=ALIGNER, help="an aligner's checkpoint; default: the one that comes along")
    parser.add_argument("--minutes", type=float, default=10.0, help="of speech")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    figures = measure(arguments.model, arguments.minutes)
    for name, figure in figures.items():
        print(f"{name}: {figure}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
