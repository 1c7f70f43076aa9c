"""The two voices: recorded word by word, each word a whole number of codec frames.

espeak-ng speaks each word by itself, once as within a sentence and once as at its end. A word's codec frames are then
the same wherever it stands. A talker of three million parameters learns that within an hour; whole sentences, each cut
into frames elsewhere, it had not learnt within ten.
"""

import random
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from training.espeak import EspeakVoice, say
from training.scene_questions import seeing
from training.world import capitals, days, draw_dialogue, repeating, small_talk, spelling, sums, weather

RATE_HZ = 24_000
FRAME_SAMPLES = 1_920  # 12.5 frames a second
VOICES = {
    "ada": EspeakVoice("en-us+f2", rate=188, pitch=55, pitch_range=35),
    "ben": EspeakVoice("en-us+f2", rate=184, pitch=5, pitch_range=35),
}
_WITHIN = 1.3  # times as fast within a sentence as at its end: a word said alone is drawn out
_QUIET = 0.03  # of the loudest sample: what is quieter, at the ends of a word, is silence
_GAP, _PAUSE = 0.03, 0.16  # seconds of silence that follow a word at least: within a sentence, after it
_LEVEL = 0.09  # root mean square
_FADE = 72  # samples
_SAID = {"a": "[[a#]]", "the": "[[D@2]]", "to": "[[t@5]]"}  # alone these are said otherwise than in a sentence
FILE = Path(__file__).parent / "out" / "units.npz"
_KINDS = (sums, days, capitals, spelling, repeating, small_talk, seeing, weather)
_PIECES = re.compile(r"[A-Za-z']+|[-.,!?:]")


def split(text: str) -> list[tuple[str, bool]]:
    """Words of `text` in lower case, spelled letters as capitals, and whether each ends a sentence or clause."""
    pieces = _PIECES.findall(text)
    words: list[tuple[str, bool]] = []
    before = ""
    for piece, following in zip(pieces, [*pieces[1:], "."], strict=True):
        if piece[0].isalpha():
            is_letter = len(piece) == 1 and "-" in (before, following)
            words.append((piece if is_letter else piece.lower(), following in ".,!?:"))
        before = piece
    return words


def starts(text: str) -> list[int]:
    """Positions in `text` at which the words of `split` begin."""
    return [found.start() for found in _PIECES.finditer(text) if found[0][0].isalpha()]


def _make_unit(voice: str, word: str, last: bool) -> np.ndarray:
    speaker = VOICES[voice]
    if not last:
        speaker = replace(speaker, rate=int(_WITHIN * speaker.rate))
    if word.isupper():
        text = f'<say-as interpret-as="characters">{word}</say-as>{"." if last else ","}'
        spoken = say(text, speaker, RATE_HZ, ssml=True)
    else:
        spoken = say(_SAID.get(word, word) + ("." if last else ","), speaker, RATE_HZ)
    loud = np.flatnonzero(np.abs(spoken.samples) > _QUIET * np.abs(spoken.samples).max())
    samples = spoken.samples[max(loud[0] - 240, 0) : loud[-1] + 240].copy()
    samples *= _LEVEL / np.sqrt(np.mean(samples**2))
    frames = -(-(len(samples) + int((_PAUSE if last else _GAP) * RATE_HZ)) // FRAME_SAMPLES)
    samples = samples[: frames * FRAME_SAMPLES]
    samples[:_FADE] *= np.linspace(0, 1, _FADE, dtype=np.float32)
    samples[-_FADE:] *= np.linspace(1, 0, _FADE, dtype=np.float32)
    return np.pad(samples, (0, frames * FRAME_SAMPLES - len(samples))).clip(-1, 1)


def unit(voice: str, word: str, last: bool) -> np.ndarray:
    """Samples of `word`, at RATE_HZ, a multiple of FRAME_SAMPLES: (samples,) float32.

    Args:
        voice: a key of `VOICES`.
        word: as `split` gives it.
        last: whether it ends a sentence or clause.

    Raises:
        KeyError: the vocabulary lacks the word.
    """
    return _units()[f"{voice} {word} {last}"]


@cache
def _units() -> dict[str, np.ndarray]:
    """All units, synthesized at once: espeak-ng's output depends a little on what it said before."""
    if not FILE.exists():
        units = {
            f"{voice} {word} {last}": _make_unit(voice, word, last) for voice in VOICES for word, last in vocabulary()
        }
        FILE.parent.mkdir(parents=True, exist_ok=True)
        np.savez(FILE, allow_pickle=False, **units)
    with np.load(FILE) as file:
        return dict(file)


def speak(voice: str, text: str) -> np.ndarray:
    """`text` in `voice`, word by word: (samples,) float32 at RATE_HZ."""
    return np.concatenate([unit(voice, word, last) for word, last in split(text)])


@cache
def vocabulary() -> tuple[tuple[str, bool], ...]:
    """Every (word, last) of the world's questions and answers, in order."""
    draw, found = random.Random(0), {"know", "that"}
    for _ in range(30_000):
        dialogue = draw_dialogue(draw, kinds=dict.fromkeys(_KINDS, 1.0))
        for turn in dialogue.turns:
            if not turn.answer.startswith("<") and not turn.question.startswith("{"):
                found |= {word for text in (turn.question, turn.answer) for word, _ in split(text)}
    return tuple((word, last) for word in sorted(found) for last in (False, True))
