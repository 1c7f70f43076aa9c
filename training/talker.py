"""The talker and its code predictor: text to codes, in two voices."""

import random
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from training import loop
from training.codec import Codes
from training.scene_questions import seeing
from training.shape import SIZES, build, config, text_embeddings, tokenizer
from training.units import VOICES, split, starts, vocabulary
from training.world import KINDS, capitals, days, draw_dialogue, small_talk, spelling, sums, weather

STEPS = 7_500
RATE, MUON_RATE = 3e-3, 3e-3
BATCH = 16
# Share of the frames before a frame of which some codes are not the true ones, in half of the answers.
_WRONG = 0.1
# A word's first frame says which word it is; the frames that follow say it again.
_BEGIN_WEIGHT = 3.0  # of the first codes of such frames
PREDICTED_BEGINS, PREDICTED_OTHERS = 0.5, 0.15  # shares of the frames whose finer codes are trained in a step
_WORD_WEIGHT, _WORD_SHARPNESS = 0.5, 20.0
_IGNORED = -100
_MEDIA = -1  # in token ids: a row of the thinker's states, which this talker does not look at


@dataclass(frozen=True)
class SpeechSample:
    """Token ids before an answer and of the answer, its codes (frames, 16), which frames begin a word, and with which
    token of the answer the word of each frame begins."""

    user: list[int]
    text: list[int]
    codes: torch.Tensor
    begins: torch.Tensor
    words: torch.Tensor
    voice: str


def _words(draw: random.Random) -> str:
    """Draws words of the world in any order."""
    known = [word for word, last in vocabulary() if last]
    letters = [word for word in known if word.isupper()]
    words = [draw.choice(known) for _ in range(draw.randint(1, 8))]
    while words[0].isupper():  # "A" is then a word: what follows it is not known yet when it is said
        words[0] = draw.choice(known)
    words = [
        "-".join(draw.choices(letters, k=draw.randint(3, 6))) if word.isupper() else _cased(word) for word in words
    ]
    text = words[0]
    for word in words[1:]:
        text += draw.choice((" ", " ", " ", " ", ", ", ". ")) + word
    return text[:1].upper() + text[1:] + draw.choice((".", ".", "!", "?"))


@cache
def _capitals() -> dict[str, str]:
    """Spelling of words that have a capital within a sentence."""
    draw, found = random.Random(3), dict[str, str]()
    for _ in range(3_000):
        text = draw_dialogue(draw, kinds={days: 1.0, capitals: 1.0}).turns[-1].answer
        found |= {word.lower(): word for word in re.findall(r"(?<= )[A-Z][a-z]+", text)}
    return found | {"i": "I"}


def _cased(word: str) -> str:
    return _capitals().get(word, word)


# What is said: answers, those with many words that others lack more often; and words in any order.
_ANSWERS = {capitals: 3.0, days: 3.0, sums: 2.0, spelling: 2.0, seeing: 2.0, small_talk: 2.0, weather: 0.5}
_REPEATED = {kind: 1.0 for kind in KINDS if kind.__name__ == "repeating"}


def draw_speech_sample(draw: random.Random, codes: Codes, held_out: bool = False) -> SpeechSample:
    """Draws an answer of the world, or words in any order, in one of the voices."""
    to_text = tokenizer()
    dialogue = draw_dialogue(draw, held_out, _ANSWERS | _REPEATED)
    answer = dialogue.turns[-1].answer
    if answer.startswith("<tool_call>") or (not held_out and draw.random() < 0.4):
        answer = _words(draw)
    if not held_out and draw.random() < 0.15:
        answer = answer.lower() if "-" not in answer else answer
    voice = draw.choice(list(VOICES))
    question = to_text.encode(f"<|im_start|>user\n{dialogue.turns[-1].question}<|im_end|>\n")
    chance = draw.random()
    if chance < 0.3:
        begin = to_text.encode("<|im_start|>user\n<|audio_start|>")
        question = begin + [_MEDIA] * draw.randint(12, 50) + to_text.encode("<|audio_end|><|im_end|>\n")
    elif chance < 0.45:
        text = question[3:]
        question = (
            to_text.encode("<|im_start|>user\n<|vision_start|>")
            + [_MEDIA] * 16
            + to_text.encode("<|vision_end|>")
            + text
        )
    words = [codes.word(voice, word, last) for word, last in split(answer)]
    begins = torch.cat([torch.arange(len(word)) == 0 for word in words])
    text = to_text(answer, return_offsets_mapping=True)
    tokens = [
        next(token for token, (_, end) in zip(text["input_ids"], text["offset_mapping"], strict=True) if end > start)
        for start in starts(answer)
    ]
    of_frames = torch.tensor(tokens).repeat_interleave(torch.tensor([len(word) for word in words]))
    return SpeechSample(question, text["input_ids"], torch.cat(words), begins, of_frames, voice)


class Talker(nn.Module):
    """The reference's talker, run on whole answers at once with the true codes before each frame."""

    def __init__(self) -> None:
        super().__init__()
        whole = config()
        self.talker: Any = build("talker")
        _initialize(self.talker)
        self._text = text_embeddings()
        talker = whole.talker_config
        self._codec = (talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id)
        self._pad, self._bos, self._eos = talker.codec_pad_id, talker.codec_bos_id, talker.codec_eos_token_id
        self._speakers = talker.speaker_id
        self._tts = (whole.tts_pad_token_id, whole.tts_bos_token_id, whole.tts_eos_token_id)
        self._header = tokenizer().encode("<|im_start|>assistant\n")

    def forward(self, batch: list[SpeechSample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Cross entropies of the first codes, of the finer ones, and of the word that is being spoken.

        In training alone a row's hidden state learns to resemble its word's text embedding: so the talker
        finds its place in the text sooner.
        """
        pad, bos, eos = self._tts
        texts, codecs, frames, labels, begins, words = [], [], [], [], [], []
        for said in batch:
            head = [*said.user, *self._header, pad, pad, pad, pad, bos, said.text[0]]
            trailing = [*said.text[1:], eos]
            count = len(said.codes)
            trailing = (trailing + [pad] * count)[:count]
            special = [*self._codec, self._speakers[said.voice], self._pad, self._bos]
            texts.append(torch.tensor(head + trailing))
            codecs.append(torch.tensor([-1] * (len(head) - 6) + special + [-1] * count))
            before = torch.full((len(head), SIZES.code_groups), -1)
            frames.append(torch.cat((before, said.codes)))
            label = torch.full((len(head) + count,), _IGNORED)
            label[len(head) - 1 : -1] = said.codes[:, 0]
            label[-1] = self._eos
            labels.append(label)
            begin = torch.zeros(len(label), dtype=torch.bool)
            begin[len(head) - 1 : -1] = said.begins
            begins.append(begin)
            word = torch.full((len(label),), _IGNORED)
            word[len(head) - 1 : -1] = said.words
            words.append(word)
        pack = nn.utils.rnn.pad_sequence
        text, codec = pack(texts, True, pad), pack(codecs, True, -1)
        frame, label, begin = pack(frames, True, -1), pack(labels, True, _IGNORED), pack(begins, True, False)
        word = pack(words, True, _IGNORED)
        rows = self._rows(text, codec, _misheard(frame) if self.training else frame)
        hidden = self.talker.model(inputs_embeds=rows).last_hidden_state
        targets = label != _IGNORED
        each = functional.cross_entropy(self.talker.codec_head(hidden[targets]), label[targets], reduction="none")
        weight = torch.where(begin[targets], _BEGIN_WEIGHT, 1.0)
        first = (each * weight).sum() / weight.sum()
        # a row's finer codes are those of the frame that follows it
        following = torch.cat((frame[:, 1:], torch.full_like(frame[:, :1], -1)), dim=1)
        speaks = targets & (following[..., 0] >= 0)
        picked = torch.rand(int(speaks.sum())) < torch.where(begin[speaks], PREDICTED_BEGINS, PREDICTED_OTHERS)
        finer = self._finer(hidden[speaks][picked], following[speaks][picked])
        read = self.talker.text_projection(self._text)
        which = hidden[speaks] @ read.T * (_WORD_SHARPNESS / read.shape[1])
        return first, finer, functional.cross_entropy(which, word[speaks])

    def _rows(self, text: torch.Tensor, codec: torch.Tensor, frame: torch.Tensor) -> torch.Tensor:
        """Inputs of the talker: its reading of the text, and the codes of the row."""
        rows = self.talker.text_projection(self._text[text.clamp_min(0)]) * (text != _MEDIA)[..., None]
        embed = self.talker.model.codec_embedding
        rows = rows + embed(codec.clamp_min(0)) * (codec >= 0)[..., None]
        spoken = frame[..., 0] >= 0
        rows[spoken] = rows[spoken] + self._embed(frame[spoken]).sum(dim=1)
        return rows

    def _embed(self, frames: torch.Tensor) -> torch.Tensor:
        """(frames, 16) codes to (frames, 16, width)."""
        finer = self.talker.code_predictor.model.codec_embedding
        first = self.talker.model.codec_embedding(frames[:, 0])
        return torch.stack([first, *(finer[i](frames[:, i + 1]) for i in range(SIZES.code_groups - 1))], dim=1)

    def _finer(self, hidden: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
        predictor = self.talker.code_predictor
        rows = torch.cat((hidden[:, None], self._embed(frames)[:, :-1]), dim=1)
        out = predictor.model(inputs_embeds=rows).last_hidden_state
        logits = torch.stack([head(out[:, i + 1]) for i, head in enumerate(predictor.lm_head)], dim=1)
        return functional.cross_entropy(logits.flatten(0, 1), frames[:, 1:].flatten())


def _misheard(frame: torch.Tensor) -> torch.Tensor:
    """Replaces some codes (answers, rows, 16) by random ones: a talker learns to go on from its own mistakes."""
    answers, rows, _ = frame.shape
    wrong = (
        (torch.rand(answers, 1, 1) < 0.5) & (torch.rand(answers, rows, 1) < _WRONG) & (torch.rand(frame.shape) < 0.5)
    )
    return torch.where(wrong & (frame >= 0), torch.randint(SIZES.codebook, frame.shape), frame)


@torch.no_grad()
def _initialize(talker: Any) -> None:
    """Keeps the variance; zeroes the projection of the thinker's states: this talker reads text alone."""
    for name, p in talker.named_parameters():
        if "codec_embedding" in name:
            p.normal_(std=0.25)
        elif p.ndim >= 2:
            p.normal_(std=(0.3 if "o_proj" in name or "down" in name else 1.0) / p.shape[-1] ** 0.5)
    for p in talker.hidden_projection.parameters():
        p.zero_()
        p.requires_grad_(False)


def train() -> None:
    """Trains the talker: `STEPS` steps, resumable."""
    codes = Codes.load()
    torch.manual_seed(0)
    model = Talker()
    optimizers = loop.Optimizers(model, RATE, outer=("embed", "head"), muon_rate=MUON_RATE)

    def step_loss(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        draw = random.Random(f"talker {step}")
        first, finer, word = model([draw_speech_sample(draw, codes) for _ in range(BATCH)])
        figures = {"first": first.item(), "finer": finer.item(), "word": word.item()}
        return first + finer + _WORD_WEIGHT * word, figures

    loop.run("talker", model, optimizers, STEPS, step_loss)


def load() -> Any:
    model: Any = loop.load("talker", Talker())
    return model.talker
