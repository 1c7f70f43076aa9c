"""The audio encoder: each row is the text embedding of the word that ends there, or of silence.

It is trained by itself, by connectionist temporal classification (Graves et al., 2006) over the world's words, after a
start with espeak-ng's word ends as targets. The thinker then reads a spoken question much as a typed one.
"""

import random
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from training import loop
from training.dialogue import split_question
from training.espeak import EspeakVoice, say
from training.shape import build, text_embeddings, tokenizer
from training.words import DO, FOREIGN, OUTSIDE, SORTS, THINGS
from training.world import KINDS, draw_dialogue, nonsense, outside, sentence

STEPS = 7_000
RATE, MUON_RATE = 1.5e-3, 1.5e-3
BATCH = 20
RATE_HZ, HOP = 16_000, 160
ALIGNED = 900  # steps in which words are wanted where they end
SHARPNESS = 20.0  # logit of a row that is a word's embedding
SILENCE, STRANGE = "<|audio_pad|>", "<|object_ref_start|>"  # whose embeddings say: no word ends here; a word, unknown
VARIANTS = (
    *("", "+f1", "+f2", "+f3", "+f5", "+m1", "+m2", "+m3", "+m5", "+m6", "+m7", "+klatt2", "+Alex", "+linda"),
    *("+Andy", "+Annie", "+Gene", "+Lee", "+Mario", "+Michael", "+adam", "+steph"),
)
HELD_OUT_VARIANTS = ("+f4", "+m4", "+m8")
ACCENTS = ("en-us", "en-us", "en-us", "en")


def draw_voice(draw: random.Random, held_out: bool = False) -> EspeakVoice:
    """Draws a voice of training, or a held-out one."""
    if held_out:
        name = "en-us" + draw.choice(HELD_OUT_VARIANTS)
        return EspeakVoice(name, draw.randint(135, 170), draw.randint(35, 65), draw.randint(35, 60))
    name = draw.choice(ACCENTS) + draw.choice(VARIANTS)
    return EspeakVoice(name, draw.randint(120, 190), draw.randint(20, 80), draw.randint(20, 80))


@cache
def words() -> tuple[str, ...]:
    """The vocabulary: the words of the world's spoken questions and sentences, in lower case."""
    draw, found = random.Random(5), set[str]()
    kinds = {kind: share for kind, share in KINDS.items() if kind not in (nonsense, outside)}
    for _ in range(20_000):
        for turn in draw_dialogue(draw, kinds=kinds).turns:
            if turn.spoken and not turn.question.startswith("{"):
                found |= set(split_question(turn.question))
    return tuple(sorted(found))


@cache
def strange_words() -> tuple[str, ...]:
    """Words outside the world, which the encoder learns as one class."""
    found = {word for text in OUTSIDE for word in split_question(text)} | {f"{thing}s" for thing in THINGS}
    found |= {word.lower() for word in (*THINGS, *DO, *DO.values(), *SORTS, *FOREIGN)}
    return tuple(sorted(found - set(words())))


def draw_texts(draw: random.Random, count: int) -> list[str]:
    """Draws spoken texts of the world's own words."""
    kinds = {kind: share for kind, share in KINDS.items() if kind not in (nonsense, outside)}
    texts: list[str] = []
    while len(texts) < count:
        turn = draw_dialogue(draw, kinds=kinds).turns[-1]
        if (
            turn.spoken
            and not turn.question.startswith("{")
            and turn.question not in ("sunny", "rainy", "cloudy", "windy", "snowy")
        ):
            texts.append(turn.question)
    return texts


@cache
def classes() -> tuple[dict[str, int], torch.Tensor]:
    """Number of each word, and the embeddings of all classes: silence is 0, a strange word 1."""
    to_text = tokenizer()
    ids = [to_text.convert_tokens_to_ids(SILENCE), to_text.convert_tokens_to_ids(STRANGE)]
    numbers: dict[str, int] = {}
    for word in words():
        numbers[word] = len(ids)
        ids.append(written(word)[0])  # all are one token, but for "o'clock"
    return numbers, text_embeddings()[ids]


def written(word: str) -> list[int]:
    """Token ids of a word within a sentence."""
    return tokenizer().encode(f" {word}")


def draw_question(draw: random.Random) -> str:
    """Draws speech of training: questions, sentences to transcribe, and questions outside the world."""
    chance = draw.random()
    if chance < 0.12:
        return f"{sentence(draw)}.".capitalize()
    if chance < 0.24:
        return outside(draw).turns[0].question
    if chance < 0.36:
        some = draw.choices((words(), strange_words()), (0.75, 0.25), k=draw.randint(2, 7))
        return " ".join(map(draw.choice, some))
    return draw_texts(draw, 1)[0]


def sound_of(
    text: str, voice: EspeakVoice, draw: random.Random, noise_db: float | None
) -> tuple[np.ndarray, list[int]]:
    """Synthesizes `text` with silence around it.

    Args:
        noise_db: how much louder speech is than the noise; None: no noise.

    Returns:
        samples (samples,) float32 at RATE_HZ, and for each word the sample at which it ends.
    """
    spoken = say(text, voice, RATE_HZ)
    before, after = (int(draw.uniform(0.02, 0.35) * RATE_HZ) for _ in range(2))
    samples = np.pad(spoken.samples, (before, after))
    ends = [start + before for _, start in spoken.words[1:]] + [len(spoken.samples) + before]
    samples *= draw.uniform(0.04, 0.15) / max(np.sqrt(np.mean(spoken.samples**2)), 1e-6)
    if noise_db is not None:
        generator = np.random.default_rng(draw.getrandbits(32))
        noise = generator.normal(size=len(samples)).astype(np.float32)
        if draw.random() < 0.5:  # brownish
            noise = np.convolve(noise, np.exp(-np.arange(32) / 8), mode="same").astype(np.float32)
        level = np.sqrt(np.mean(samples**2)) / 10 ** (noise_db / 20)
        samples = samples + noise * level / np.sqrt(np.mean(noise**2))
    return samples.clip(-1, 1).astype(np.float32), ends


@cache
def _extractor() -> Any:
    import transformers

    return transformers.WhisperFeatureExtractor(feature_size=128, chunk_length=300)


def mel(samples: np.ndarray) -> torch.Tensor:
    """Features of the published processor: (128, columns) float32, 100 columns a second."""
    features = _extractor()(samples, sampling_rate=RATE_HZ, padding="do_not_pad", truncation=False, return_tensors="pt")
    return features["input_features"][0]


def rows_of(columns: int) -> int:
    """Returns the encoder's rows for so many columns of features."""
    rest = columns % 100
    for _ in range(3):
        rest = (rest + 1) // 2
    return columns // 100 * 13 + rest


def row_at(sample: int) -> int:
    """Returns the row of a sample."""
    column = sample // HOP
    return column // 100 * 13 + column % 100 // 8


class AudioEncoder(nn.Module):
    """The reference's audio encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.audio_tower: Any = build("thinker").audio_tower  # type: ignore[union-attr]
        self._classes = classes()[1]

    def encode(self, features: list[torch.Tensor]) -> list[torch.Tensor]:
        """Rows of each sound: (rows, width of the thinker)."""
        lengths = torch.tensor([each.shape[1] for each in features])
        rows = self.audio_tower(torch.cat(features, dim=1), feature_lens=lengths).last_hidden_state
        return list(rows.split([rows_of(int(length)) for length in lengths]))

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits (rows, classes)."""
        return rows @ self._classes.T * (SHARPNESS / self._classes.shape[1])


def train() -> None:
    """Trains the audio encoder: `STEPS` steps, resumable."""
    torch.manual_seed(0)
    model = AudioEncoder()
    optimizers = loop.Optimizers(model, RATE, outer=("conv", "proj2"), muon_rate=MUON_RATE)
    numbers, _ = classes()

    def step_loss(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        draw = random.Random(f"hearing {step}")
        sounds = [draw_question(draw) for _ in range(BATCH)]
        samples_and_ends = [
            sound_of(text, draw_voice(draw), draw, draw.uniform(3, 25) if draw.random() < 0.6 else None)
            for text in sounds
        ]
        rows = model.encode([mel(samples) for samples, _ in samples_and_ends])
        labels = [[numbers.get(word, 1) for word in split_question(text)] for text in sounds]
        if step < ALIGNED:
            return _aligned(model, rows, labels, [ends for _, ends in samples_and_ends])
        return _temporal(model, rows, labels)

    loop.run("hearing", model, optimizers, STEPS, step_loss)


def _aligned(
    model: AudioEncoder, rows: list[torch.Tensor], labels: list[list[int]], ends: list[list[int]]
) -> tuple[torch.Tensor, dict[str, float]]:
    wanted = []
    for row, label, end in zip(rows, labels, ends, strict=True):
        target = torch.zeros(len(row), dtype=torch.long)
        if len(label) == len(end):  # espeak-ng joins some words into one event
            for number, sample in zip(label, end, strict=True):
                target[min(row_at(sample), len(row) - 1)] = number
            wanted.append(target)
        else:
            wanted.append(torch.full((len(row),), -100))
    target = torch.cat(wanted)
    logits = model.logits(torch.cat(rows))
    weight = torch.ones(logits.shape[1])
    weight[0] = 0.3
    loss = functional.cross_entropy(logits, target, weight)
    spoken = target > 0
    return loss, {"words": (logits.argmax(dim=1) == target)[spoken].float().mean().item()}


def _temporal(
    model: AudioEncoder, rows: list[torch.Tensor], labels: list[list[int]]
) -> tuple[torch.Tensor, dict[str, float]]:
    chances = [model.logits(row).log_softmax(dim=1) for row in rows]
    packed = nn.utils.rnn.pad_sequence(chances)
    target = torch.tensor([number for label in labels for number in label])
    lengths = torch.tensor([len(row) for row in rows]), torch.tensor([len(label) for label in labels])
    loss = functional.ctc_loss(packed, target, *lengths, zero_infinity=True)
    right = np.mean([_best(chance) == label for chance, label in zip(chances, labels, strict=True)])
    return loss, {"sentences": float(right)}


def _best(chances: torch.Tensor) -> list[int]:
    """The words of the likeliest classes of all rows."""
    best = chances.argmax(dim=1).tolist()
    return [number for number, before in zip(best, [0, *best[:-1]], strict=True) if number not in (0, before)]


def load() -> AudioEncoder:
    model = AudioEncoder()
    loop.load("hearing", model)
    return model


def evaluate(count: int = 200) -> None:
    """Prints how many held-out sentences in held-out voices are recognized whole."""
    model, names = load(), [*classes()[0]]
    for noise_db in (None, 10.0):
        draw, right = random.Random(99), 0
        for i in range(count):
            text = f"{sentence(draw)}." if i % 5 == 0 else draw_texts(draw, 1)[0]
            samples, _ = sound_of(text, draw_voice(draw, held_out=True), draw, noise_db)
            with torch.inference_mode():
                recognized = _best(model.logits(model.encode([mel(samples)])[0]))
            said = [names[number - 2] if number > 1 else "?" for number in recognized]
            right += said == split_question(text)
            if said != split_question(text) and i < 30:
                print("  ", " ".join(split_question(text)), "->", " ".join(said))
        print(f"hearing: {right} of {count} whole sentences, noise {noise_db} dB", flush=True)
