"""The small aligner's path, by counting all paths; words of texts; batches of the engine."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch

from services.aligner.config import AlignerSettings
from services.aligner.engine import AlignerEngine
from services.aligner.family import RATE_HZ, Sound, WordTimes
from services.aligner.words import places, split_words
from services.families.ctc_aligner.net import ANY, BLANK, CLASSES, LetterNet, classes_of
from services.families.ctc_aligner.viterbi import Scores, place


def drawn(frames: int, seed: int) -> Scores:
    draw = np.random.default_rng(seed)
    letters = 3 * draw.standard_normal((frames, CLASSES))
    letters -= np.logaddexp.reduce(letters, axis=1, keepdims=True)
    return Scores(letters, 2 * draw.standard_normal(frames), 2 * draw.standard_normal(frames))


def best_by_counting(scores: Scores, words: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Every way to give each frame silence, or a word and its blank or letter, is weighed."""
    symbols: list[tuple[int, int, int]] = [(-1, 0, 0)]  # word, place among its letters, class
    for index, word in enumerate(words):
        symbols += [(index, 2 * i, BLANK) for i in range(len(word) + 1)]
        symbols += [(index, 2 * i + 1, letter) for i, letter in enumerate(word)]
    best: tuple[float, list[tuple[int, int]]] = (-np.inf, [])
    for path in product(symbols, repeat=len(scores.begins)):
        if spoken_words(path, words) and (found := weight(path, scores)) > best[0]:
            frames = [[i for i, symbol in enumerate(path) if symbol[0] == index] for index in range(len(words))]
            best = found, [(each[0], each[-1] + 1) for each in frames]
    return best[1]


def spoken_words(path: Sequence[tuple[int, int, int]], words: Sequence[Sequence[int]]) -> bool:
    """Whether the path goes through each word once, in order, from its first letter to its last."""
    visited = [symbol[0] for i, symbol in enumerate(path) if i == 0 or path[i - 1][0] != symbol[0]]
    if [index for index in visited if index >= 0] != list(range(len(words))):
        return False
    for index, word in enumerate(words):
        inside = [at for number, at, _ in path if number == index]
        if inside[0] > 1 or inside[-1] < 2 * len(word) - 1:
            return False
        for before, after in pairwise(inside):
            skips = after == before + 2 and after % 2 == 1 and word[before // 2] != word[after // 2]
            if not (after in (before, before + 1) or skips):
                return False
    return True


def weight(path: Sequence[tuple[int, int, int]], scores: Scores) -> float:
    def log_sigmoid(logit: float) -> float:
        return -float(np.logaddexp(0, -logit))

    total = 0.0
    for frame, (index, _, letter) in enumerate(path):
        if index < 0:
            total += log_sigmoid(scores.silence[frame])
            continue
        said = scores.letters[frame, 1:].max() if letter == ANY else scores.letters[frame, letter]
        begins = frame == 0 or path[frame - 1][0] != index
        total += log_sigmoid(-scores.silence[frame]) + said
        total += log_sigmoid(scores.begins[frame] if begins else -scores.begins[frame])
    return total


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("words", [[[1, 2]], [[1], [1]], [[1, 1]], [[ANY], [2]]], ids=str)
def test_the_path_is_the_most_likely_of_all(words: list[list[int]], seed: int) -> None:
    scores = drawn(5, seed)
    assert place(scores, words) == best_by_counting(scores, words)


def test_many_words_are_each_in_their_turn() -> None:
    words = [[1 + i % 5, 2] for i in range(150)]
    found = place(drawn(700, 0), words)
    assert len(found) == len(words)
    assert all(begin < end <= following for (begin, end), (following, _) in pairwise(found))


def test_a_sound_too_short_for_its_letters_is_divided() -> None:
    assert place(drawn(4, 0), [[1, 2, 3], [4, 5, 6]]) == [(0, 2), (2, 4)]


def test_letters_have_no_accents_and_others_are_any() -> None:
    assert classes_of("Caf\u00e9's") == [3, 1, 6, 5, 27, 19]
    assert classes_of("4\u4f60") == [ANY, ANY]
    assert classes_of("...") == [ANY]


def test_the_net_reads_each_sound_as_if_alone() -> None:
    torch.manual_seed(0)
    net = LetterNet(16, [1, 2]).eval()
    sounds = [torch.randn(size) for size in (4000, 1700, 9000)]
    lengths = torch.tensor([len(each) for each in sounds])
    with torch.inference_mode():
        together = net(torch.nn.utils.rnn.pad_sequence(sounds, batch_first=True), lengths)
        for row, sound in enumerate(sounds):
            alone = net(sound[None], lengths[row : row + 1])
            frames = int(net.frames_of(lengths)[row])
            for one, each in zip(alone, together, strict=True):
                torch.testing.assert_close(each[row, :frames], one[0], atol=2e-5, rtol=1e-4)


def test_words_and_their_places() -> None:
    text = "Well-known: it's 5\u00a0pm, \u4f60\u597d (ok)."
    words = split_words(text)
    assert words == ["Wellknown", "it's", "5", "pm", "\u4f60", "\u597d", "ok"]
    assert [text[begin:end] for begin, end in places(text, words)] == [
        *("Well-known", "it's", "5", "pm", "\u4f60", "\u597d", "ok")
    ]


class Counting:
    """Gives a word the number of sounds in its step, and out of order."""

    dtype, device, max_audio_s, resolution_ms = torch.float32, "cpu", 60.0, 1.0

    def __init__(self) -> None:
        self.languages: Sequence[str] = ()
        self.steps: list[int] = []

    def split(self, text: str, language: str) -> list[str]:
        return text.split()

    def align(self, sounds: Sequence[Sound]) -> list[list[WordTimes]]:
        self.steps.append(len(sounds))
        if any("fail" in sound.words for sound in sounds):
            raise RuntimeError("no memory")
        return [[WordTimes(9 - i, 3) for i in range(len(sound.words))] for sound in sounds]


def of_seconds(seconds: float, *words: str) -> Sound:
    return Sound(np.zeros(round(seconds * RATE_HZ), np.float32), words or ("a", "b"))


async def engine_of(sounds: Sequence[Sound], **settings: Any) -> tuple[list[Any], list[int]]:
    model = Counting()
    engine = AlignerEngine(model, AlignerSettings(model="x", **settings))
    results = await asyncio.gather(*map(engine.align, sounds), return_exceptions=True)
    engine.close()
    return results, model.steps


async def test_steps_take_as_many_sounds_as_fit() -> None:
    results, steps = await engine_of([of_seconds(1)] * 5, max_batch_sounds=2)
    assert steps == [2, 2, 1]
    assert results == [[WordTimes(9, 9), WordTimes(9, 9)]] * 5  # no word is before the one before it
    _, steps = await engine_of([of_seconds(2), of_seconds(3), of_seconds(9), of_seconds(1)], max_batch_audio_s=6)
    assert steps == [2, 1, 1]


async def test_a_failed_step_fails_its_sounds_alone() -> None:
    results, steps = await engine_of([of_seconds(1, "fail"), of_seconds(1)], max_batch_sounds=1)
    assert isinstance(results[0], RuntimeError)
    assert (results[1], steps) == ([WordTimes(9, 9), WordTimes(9, 9)], [1, 1])
