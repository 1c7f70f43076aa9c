"""The aligner: letters, begins of words and silence, heard in espeak-ng's speech, whose times are known.

Letters are learnt by connectionist temporal classification (Graves et al., 2006), word by word within its known time;
the two other heads frame by frame.
"""

import random
import re
from dataclasses import dataclass
from functools import cache
from pydoc_data.topics import topics

import numpy as np
import torch
from torch.nn import functional

from services.families.ctc_aligner.net import ANY, BLANK, HOP, RATE_HZ, Heard, LetterNet, classes_of
from training import loop
from training.espeak import Utterance, say
from training.hearing import draw_texts, draw_voice

NAME = "aligner"
STEPS, BATCH, RATE = 1_600, 12, 2e-3
SHAPE = {"width": 96, "dilations": [1, 2, 4, 8, 1, 2, 4, 8]}
MOST_CHARACTERS, MOST_PADDING_S = 70, 0.5
BEGIN_WEIGHT = 4.0  # of the one frame among about thirty in which a word begins


@dataclass(frozen=True)
class SpokenWord:
    """A word as espeak-ng says it, sometimes two of the text's: `begin`, `end` in samples, `text_at` in characters."""

    text: str
    text_at: int
    begin: int
    end: int


def spoken_words(text: str, spoken: Utterance) -> list[SpokenWord]:
    """The words of `text` with their times. A word ends where the next one begins, or a pause before that."""
    found = list[SpokenWord]()
    pauses = np.array([*spoken.pauses, len(spoken.samples)])
    for i, (at, begin) in enumerate(spoken.words):
        following = spoken.words[i + 1 :][:1]
        text_end, end = following[0] if following else (len(text), len(spoken.samples))
        pause = int(pauses[np.searchsorted(pauses, begin, side="right")]) if begin < pauses[-1] else end
        found.append(SpokenWord(text[at:text_end].strip(), at, begin, min(end, pause)))
    return [word for word in found if word.end > word.begin]


@cache
def sentences() -> tuple[str, ...]:
    """English that is in every Python: the help on its language."""
    text = re.sub(r"[^A-Za-z' .,;:?!-]", " ", " ".join(topics.values()))
    parts = re.split(r"(?<=[.;:,])\s", re.sub(r"\s+", " ", text))
    wordy = re.compile(r"[A-Za-z][a-z']*[,.;:?!]?")
    return tuple(
        part
        for part in parts
        if len(part) <= MOST_CHARACTERS and len(part.split()) > 3 and all(map(wordy.fullmatch, part.split()))
    )


def draw_utterance(draw: random.Random) -> tuple[np.ndarray, list[SpokenWord]]:
    """Padded, loud or quiet, clean or noisy; the words' times are those of the padded sound."""
    text = draw.choice(sentences()) if draw.random() < 0.75 else draw_texts(draw, 1)[0]
    spoken = say(text, draw_voice(draw), RATE_HZ)
    before, behind = (int(draw.uniform(0, MOST_PADDING_S) * RATE_HZ) for _ in range(2))
    samples = np.pad(spoken.samples, (before, behind)) * 10 ** draw.uniform(-1, 0.3)
    noise = np.random.default_rng(draw.getrandbits(32)).standard_normal(len(samples))
    samples = samples + noise * np.abs(samples).mean() * 10 ** draw.uniform(-3, -0.5)
    words = [
        SpokenWord(word.text, word.text_at, word.begin + before, word.end + before)
        for word in spoken_words(text, spoken)
    ]
    return samples.clip(-1, 1).astype(np.float32), words


def losses(heard: Heard, frames: torch.Tensor, words: list[list[SpokenWord]]) -> dict[str, torch.Tensor]:
    """Means: `letters` over words, `begins` and `silence` over frames."""
    begins, silence = torch.zeros_like(heard.begins), torch.ones_like(heard.silence)
    pieces, targets = list[torch.Tensor](), list[list[int]]()
    for row, said in enumerate(words):
        for word in said:
            first, last = round(word.begin / HOP), max(round(word.end / HOP), round(word.begin / HOP) + 1)
            begins[row, first], silence[row, first:last] = 1.0, 0.0
            letters = classes_of(word.text)
            if ANY not in letters:
                pieces.append(heard.letters[row, first:last])
                targets.append(letters)
    counts = torch.arange(begins.shape[1]) < frames[:, None]
    weight = torch.where(begins > 0, BEGIN_WEIGHT, 1.0)
    letters = functional.ctc_loss(
        torch.nn.utils.rnn.pad_sequence(pieces),
        torch.tensor([each for target in targets for each in target]),
        torch.tensor([len(piece) for piece in pieces]),
        torch.tensor([len(target) for target in targets]),
        blank=BLANK,
        zero_infinity=True,
    )
    by_frame = functional.binary_cross_entropy_with_logits
    return {
        "letters": letters,
        "begins": by_frame(heard.begins[counts], begins[counts], weight[counts]),
        "silence": by_frame(heard.silence[counts], silence[counts]),
    }


def train() -> None:
    net = LetterNet(**SHAPE)

    def step_loss(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        draw = random.Random(step)
        drawn = [draw_utterance(draw) for _ in range(BATCH)]
        lengths = torch.tensor([len(samples) for samples, _ in drawn])
        sounds = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(samples) for samples, _ in drawn], batch_first=True)
        found = losses(net(sounds, lengths), net.frames_of(lengths), [words for _, words in drawn])
        loss = found["letters"] + 4 * found["begins"] + found["silence"]
        return loss, {name: each.item() for name, each in found.items()}

    loop.run(NAME, net, loop.Optimizers(net, RATE, ("enter", "head", "depth")), STEPS, step_loss)
