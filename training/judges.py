"""Judges of answers, speech and images."""

import random
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import soxr
from PIL import Image, ImageDraw

from training.scene_questions import seeing
from training.scenes import FINER, SIDE, draw_shape
from training.words import COLOURS, SHAPES
from training.world import KINDS, draw_dialogue, nonsense, outside, weather

_LISTENS_HZ = 16_000
_SILENCE_S = 0.25  # before and after what is listened to
_DITHER = 3e-4  # of full scale: pocketsphinx cannot take the logarithm of no sound at all


def plain(text: str) -> str:
    """The words of `text`, as the listener's grammar has them."""
    return " ".join(re.findall(r"[a-z']+", text.lower()))


def held_out_answers(count: int, seed: int = 0) -> list[str]:
    """Answers to held-out questions, no two with the same words."""
    kinds = {kind: share for kind, share in KINDS.items() if kind not in (nonsense, outside, weather)}
    draw, found = random.Random(f"answers {seed}"), dict[str, str]()
    while len(found) < count:
        answer = draw_dialogue(draw, held_out=True, kinds=kinds | {seeing: 2.0}).turns[-1].answer
        found.setdefault(plain(answer), answer)
    return list(found.values())


class Listener:
    """pocketsphinx with its own English model and a grammar of `sentences`."""

    def __init__(self, sentences: Iterable[str]) -> None:
        from pocketsphinx import Decoder

        self._decoder: Any = Decoder(samprate=_LISTENS_HZ, loglevel="FATAL")
        choices = " | ".join(sorted({plain(sentence) for sentence in sentences}))
        self._decoder.add_jsgf_string("world", f"#JSGF V1.0;\ngrammar world;\npublic <said> = {choices};\n")
        self._decoder.activate_search("world")

    def recognize(self, samples: np.ndarray, rate_hz: int) -> str:
        """Returns the sentence in `samples` (samples,) float32, in plain words; "" for none."""
        sound = soxr.resample(samples.astype(np.float32), rate_hz, _LISTENS_HZ)
        sound = np.pad(sound, int(_SILENCE_S * _LISTENS_HZ))
        sound = sound + np.random.default_rng(0).normal(0, _DITHER, len(sound))
        self._decoder.start_utt()
        self._decoder.process_raw((sound.clip(-1, 1) * 32767).astype(np.int16).tobytes(), full_utt=True)
        self._decoder.end_utt()
        hypothesis = self._decoder.hyp()
        return hypothesis.hypstr if hypothesis else ""


def mel_cepstral_distance(ours: np.ndarray, theirs: np.ndarray, rate_hz: int) -> float:
    """In dB, between two sounds of the same words, aligned by dynamic time warping (Kubichek, 1993)."""
    a, b = _cepstra(ours, rate_hz), _cepstra(theirs, rate_hz)
    cost = np.sqrt(2 * ((a[:, None] - b[None]) ** 2).sum(axis=2)) * 10 / np.log(10)
    total, steps = np.full(cost.shape, np.inf), np.zeros(cost.shape)
    total[0, 0], steps[0, 0] = cost[0, 0], 1
    for i in range(len(a)):
        for j in range(len(b)):
            for u, v in ((i - 1, j - 1), (i - 1, j), (i, j - 1)):
                if u >= 0 and v >= 0 and total[u, v] + cost[i, j] < total[i, j]:
                    total[i, j], steps[i, j] = total[u, v] + cost[i, j], steps[u, v] + 1
    return float(total[-1, -1] / steps[-1, -1])


def _cepstra(samples: np.ndarray, rate_hz: int) -> np.ndarray:
    """(columns, 13): mel cepstra without the first, which is loudness; 20 ms columns where there is sound."""
    from scipy.fft import dct
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    filters = mel_filter_bank(513, 40, 0.0, rate_hz / 2, rate_hz, norm="slaney", mel_scale="slaney")
    power = spectrogram(
        samples.astype(np.float64), window_function(1024), 1024, rate_hz // 50, power=2.0, mel_filters=filters
    )
    loud = power.sum(axis=0) > 1e-4 * power.sum(axis=0).max()
    cepstra = np.asarray(dct(np.log(np.maximum(power[:, loud], 1e-8)).T / 2, axis=1, norm="ortho"))
    return cepstra[:, 1:14]


def find_shape(image: Image.Image) -> tuple[str, str, str]:
    """Finds colour, shape and ground of an image with one shape; "" for what is not clear.

    The ground is the colour of most pixels at the edges; the shape is the one that covers the other pixels best.
    """
    pixels = np.asarray(image.convert("RGB").resize((SIDE, SIDE))).astype(float)
    table = np.array(list(COLOURS.values()), float)
    nearest = ((pixels[:, :, None] - table) ** 2).sum(axis=3).argmin(axis=2)
    edges = np.concatenate((nearest[:3].ravel(), nearest[-3:].ravel(), nearest[:, :3].ravel(), nearest[:, -3:].ravel()))
    ground = int(np.bincount(edges).argmax())
    counts = np.bincount(nearest[nearest != ground].ravel(), minlength=len(table))
    if counts.max() < 60:
        return "", "", list(COLOURS)[ground]
    colour = int(counts.argmax())
    return list(COLOURS)[colour], _best_shape(nearest == colour), list(COLOURS)[ground]


def _best_shape(there: np.ndarray) -> str:
    rows, columns = np.flatnonzero(there.sum(axis=1) > 1), np.flatnonzero(there.sum(axis=0) > 1)
    if len(rows) < 4 or len(columns) < 4:
        return ""
    middle_x, middle_y = (columns[0] + columns[-1] + 1) / 2, (rows[0] + rows[-1] + 1) / 2
    half = max(columns[-1] - columns[0] + 1, rows[-1] - rows[0] + 1) / 2
    best = dict[str, float]()
    for shape in SHAPES:
        for size in (0.94, 1.0, 1.06, 1.12):
            for shift in (-0.06, 0.0, 0.06):
                image = Image.new("L", (SIDE * FINER, SIDE * FINER))
                x, y, radius = middle_x, middle_y + shift * half, half * size
                draw_shape(ImageDraw.Draw(image), shape, 255, 0, x, y, radius)
                wanted = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX)) > 127
                overlap = (wanted & there).sum() / max((wanted | there).sum(), 1)
                best[shape] = max(best.get(shape, 0.0), overlap)
    shape = max(best, key=lambda name: best[name])
    return shape if best[shape] > 0.7 else ""
