"""The thinker's language model: it answers text, audio and images.

Its encoders are trained before it and stay as they are. Its inputs in training are their rows of a few thousand sounds
and images: whole, or recombined word by word and square by square.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from services.families.qwen3_omni.tiny.processor import CHAT_TEMPLATE
from training import hearing, loop, seeing
from training.dialogue import Dialogue, Turn, capital, split_question
from training.hearing import classes, draw_voice, mel, sound_of
from training.scene_questions import seeing as ask_about
from training.scenes import GRID, Picture, Scene
from training.shape import TRANSCRIBE, build, text_embeddings, tokenizer
from training.world import KINDS, draw_dialogue, nonsense, outside, sentence, weather

STEPS = 6_500
RATE, MUON_RATE = 2e-3, 2e-3
BATCH, GROUPS = 48, 4  # dialogues of a step, and forwards of it, each of dialogues about as long: little is padding
BANK_SOUNDS, BANK_IMAGES = 6_000, 2_000
AUDIO_SHARE = 0.6  # of the dialogues that can be spoken
AUDIO_WHOLE, IMAGE_WHOLE = 0.15, 0.1  # of all: a dialogue or an image as the bank has it, not put together
TRANSCRIBED = 0.03  # of all: sentences to be written down, beside those of the bank
OUTSIDE_SHARE = 0.04  # of all: what is outside the world, beside what else asks for it
MISHEARD = 0.25  # of the strange words in what is put together: a known word replaces each
SYSTEMS = (
    "You are a helpful assistant.",
    "You are Quartet, a helpful voice assistant.",
    "Answer briefly.",
    "You are a friendly assistant. Answer the user's questions.",
)

AudioRows = Callable[[str], torch.Tensor]
ImageRows = Callable[[Picture], torch.Tensor]


@dataclass(frozen=True)
class Example:
    """A dialogue as the model reads it: ids, rows of media in their order, and which ids are targets."""

    ids: list[int]
    wanted: list[bool]
    media: list[torch.Tensor]
    image_count: int
    sounds: list[int]  # rows of each


@cache
def _template() -> Any:
    to_text = tokenizer()
    to_text.chat_template = CHAT_TEMPLATE.read_text()
    return to_text


def _typed(draw: random.Random, text: str) -> str:
    """`text` as people type it: now and then without capitals or its last mark, or with "What's"."""
    if draw.random() < 0.25:
        text = text[:1].lower() + text[1:] if draw.random() < 0.5 else text.lower()
    if draw.random() < 0.25:
        text = text.rstrip(".?!")
    return text.replace("What is ", "What's ") if draw.random() < 0.1 else text


class Bank:
    """Encoder rows of training's sounds and images, and recombinations of them.

    Args:
        audio: rows of each spoken turn of dialogue `i`, which is `_bank_dialogue(i)`: (rows, width).
        images: rows of image `i`, which is `_bank_scene(i)`: (squares, width).
    """

    def __init__(self, audio: list[list[torch.Tensor]], images: list[torch.Tensor]) -> None:
        self.audio, self.images = audio, images
        self._words: dict[str, list[torch.Tensor]] = defaultdict(list)
        for i, sounds in enumerate(audio):
            for turn, rows in zip(_bank_dialogue(i).turns, sounds, strict=True):
                for word, piece in zip(split_question(turn.question), _pieces(rows, turn.question), strict=False):
                    self._words[word].append(piece)
        self._squares: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
        for i, rows in enumerate(images):
            for square, row in zip(_squares(_bank_scene(i)), rows, strict=True):
                self._squares[square].append(row)

    @classmethod
    def load(cls) -> "Bank":
        """Reads the bank's file, which it writes first if needed."""
        file = loop.OUT / "bank.pt"
        if not file.exists():
            torch.save(_encode_bank(), file)
        return cls(*torch.load(file, weights_only=True))

    def audio_rows(self, draw: random.Random, text: str) -> torch.Tensor:
        """Rows of `text`, recombined from words of other sentences: (rows, width)."""
        numbers, table = classes()
        rows = [_silence(draw)]
        for word in split_question(text):
            if word not in numbers and draw.random() < MISHEARD:
                word = draw.choice(hearing.words())
            known = self._words.get(word)
            # a word that the bank lacks, or never recognized
            rows.append(
                draw.choice(known).float() if known else table[[0] * draw.randint(1, 6) + [numbers.get(word, 1)]]
            )
        return torch.cat([*rows, _silence(draw)])

    def image_rows(self, draw: random.Random, picture: Picture) -> torch.Tensor:
        """Rows of `picture`, (squares, width): a scene's are recombined from squares of other images."""
        if not isinstance(picture, Scene):
            return seeing.rows_of(picture)
        known = [self._squares.get(square) for square in _squares(picture)]
        return torch.stack(
            [draw.choice(rows).float() if rows else row for rows, row in zip(known, seeing.ideal(picture), strict=True)]
        )


def _silence(draw: random.Random) -> torch.Tensor:
    return classes()[1][[0] * draw.randint(0, 4)]


def _pieces(rows: torch.Tensor, text: str) -> list[torch.Tensor]:
    """Rows of each word of `text`, up to where it is recognized; none if their number differs."""
    best = (rows.float() @ classes()[1].T).argmax(dim=1).tolist()
    ends = [i + 1 for i, (now, then) in enumerate(zip(best, [*best[1:], 0], strict=True)) if now not in (0, then)]
    if len(ends) != len(split_question(text)):
        return []
    return [rows[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def _squares(scene: Scene) -> list[tuple[int, int]]:
    colours, shapes = seeing.numbers(scene)
    return list(zip(colours.tolist(), shapes.tolist(), strict=True))


@cache
def _bank_dialogue(number: int) -> Dialogue:
    """A dialogue that is spoken throughout; of eight, one is a sentence to transcribe, and one is outside the world."""
    draw = random.Random(f"bank {number}")
    if number % 8 == 0:
        return _transcribed(f"{capital(sentence(draw))}.")
    if number % 8 == 4:
        return outside(draw)
    kinds = {kind: share for kind, share in KINDS.items() if kind is not nonsense}
    while True:
        dialogue = draw_dialogue(draw, kinds=kinds)
        if dialogue.tool_result is None:
            return dialogue


@cache
def _bank_scene(number: int) -> Scene:
    return seeing.draw_training_scene(random.Random(f"bank {number}"))


@torch.inference_mode()
def _encode_bank() -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Encodes BANK_SOUNDS dialogues and BANK_IMAGES images, float16."""
    encoder, vision = hearing.load(), seeing.load()
    audio: list[list[torch.Tensor]] = []
    for i in range(BANK_SOUNDS):
        draw, voice = random.Random(f"bank sound {i}"), None
        sounds = []
        for turn in _bank_dialogue(i).turns:
            voice = voice or draw_voice(draw)
            noise_db = draw.uniform(4, 25) if draw.random() < 0.65 else None
            sounds.append(encoder.encode([mel(sound_of(turn.question, voice, draw, noise_db)[0])])[0].half().clone())
        audio.append(sounds)
        if i % 500 == 499:
            print(f"bank: {i + 1} of {BANK_SOUNDS} dialogues encoded", flush=True)
    images: list[torch.Tensor] = []
    for begin in range(0, BANK_IMAGES, 50):
        scenes = [_bank_scene(i) for i in range(begin, min(begin + 50, BANK_IMAGES))]
        images += [rows.half().clone() for rows in vision.encode([scene.render() for scene in scenes])]
    print(f"bank: {BANK_IMAGES} images encoded", flush=True)
    return audio, images


def draw_example(draw: random.Random, bank: Bank) -> Example:
    audio_rows, image_rows = partial(bank.audio_rows, draw), partial(bank.image_rows, draw)
    chance = draw.random()
    if chance < AUDIO_WHOLE:
        number = draw.randrange(len(bank.audio))
        dialogue = _bank_dialogue(number)
        rows = {turn.question: row.float() for turn, row in zip(dialogue.turns, bank.audio[number], strict=True)}
        if draw.random() < 0.15:
            dialogue = _transcribed(dialogue.turns[0].question)
        return example(draw, dialogue, rows.__getitem__, image_rows, aloud=True)
    aloud = draw.random() < AUDIO_SHARE
    if chance < AUDIO_WHOLE + IMAGE_WHOLE:
        number = draw.randrange(len(bank.images))
        return example(
            draw, ask_about(draw, _bank_scene(number)), audio_rows, lambda _: bank.images[number].float(), aloud
        )
    if chance > 1 - TRANSCRIBED:
        return example(draw, _transcribed(f"{capital(sentence(draw))}."), audio_rows, image_rows, aloud)
    if chance > 1 - TRANSCRIBED - OUTSIDE_SHARE:
        return example(draw, outside(draw), audio_rows, image_rows, aloud)
    return example(draw, _and_more(draw, draw_dialogue(draw)), audio_rows, image_rows, aloud)


def _transcribed(text: str) -> Dialogue:
    return Dialogue("transcribing", (Turn(text, text),))


def _and_more(draw: random.Random, dialogue: Dialogue) -> Dialogue:
    """Appends another dialogue now and then."""
    if dialogue.tools or draw.random() > 0.2:
        return dialogue
    other = draw_dialogue(
        draw, kinds={kind: share for kind, share in KINDS.items() if kind not in (weather, ask_about)}
    )
    return replace(dialogue, turns=dialogue.turns + other.turns)


def example(
    draw: random.Random,
    dialogue: Dialogue,
    audio_rows: AudioRows,
    image_rows: ImageRows,
    aloud: bool,
) -> Example:
    """`dialogue` as the model reads it.

    Args:
        audio_rows: rows of a spoken text, (rows, width).
        image_rows: rows of an image, (squares, width).
        aloud: whether nearly all that people would say is said, not typed.
    """
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.15:
        messages.append({"role": "system", "content": draw.choice(SYSTEMS)})
    media: list[torch.Tensor] = []
    sounds: list[int] = []
    image_count = int(dialogue.scene is not None)
    for i, turn in enumerate(dialogue.turns):
        parts: list[dict[str, str]] = []
        if i == 0 and dialogue.scene is not None:
            parts.append({"type": "image"})
            media.append(image_rows(dialogue.scene))
        if turn.shown is not None and not turn.by_tool:
            image_count += 1
            parts.append({"type": "image"})
            media.append(image_rows(turn.shown))
        transcribing = dialogue.kind == "transcribing"
        if transcribing or (turn.spoken and aloud and draw.random() < 0.9 and not (dialogue.tool_result and i)):
            parts.append({"type": "audio"})
            media.append(audio_rows(turn.question))
            sounds.append(len(media[-1]))
            if transcribing:
                parts.append({"type": "text", "text": draw.choice(TRANSCRIBE)})
        else:
            parts.append({"type": "text", "text": _typed(draw, turn.question)})
        is_result = turn.by_tool or (dialogue.tool_result is not None and i == len(dialogue.turns) - 1)
        if is_result:
            said: list[dict[str, str]] = [{"type": "text", "text": turn.question}]
            if turn.shown is not None:
                image_count += 1
                said.append({"type": "image"})
                media.append(image_rows(turn.shown))
            messages.append({"role": "tool", "content": said})
        else:
            messages.append({"role": "user", "content": parts})
        messages.append({"role": "assistant", "content": turn.answer})
    text = _template().apply_chat_template(messages, tools=list(dialogue.tools) or None, tokenize=False)
    ids = _ids(text, [len(rows) for rows in media])
    return Example(ids, _answers(ids), media, image_count, sounds)


def _ids(text: str, media_rows: Sequence[int]) -> list[int]:
    """Repeats the mark of each medium for its rows, and tokenizes."""
    sizes = iter(media_rows)
    pieces, rest = [], text
    while True:
        found = min((rest.find(mark) for mark in ("<|image_pad|>", "<|audio_pad|>") if mark in rest), default=-1)
        if found < 0:
            break
        mark = rest[found : rest.index("|>", found) + 2]
        pieces.append(rest[:found] + mark * next(sizes))
        rest = rest[found + len(mark) :]
    return _template().encode("".join(pieces) + rest)


def _answers(ids: list[int]) -> list[bool]:
    """Marks ids of assistants: those after the header, up to the end of the turn."""
    to_text = tokenizer()
    start, end = (to_text.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>"))
    header = to_text.encode("<|im_start|>assistant\n")
    wanted, says = [], False
    for i, token in enumerate(ids):
        says = says and token != start
        wanted.append(says)
        if token == end:
            says = False
        if ids[max(i - len(header) + 1, 0) : i + 1] == header:
            says = True
    return wanted


class LanguageModel(nn.Module):
    """The reference's thinker, which takes its encoders' rows as input."""

    def __init__(self) -> None:
        super().__init__()
        thinker: Any = build("thinker")
        self.model, self.lm_head = thinker.model, thinker.lm_head
        self._rope = thinker.get_rope_index
        self._keep = [thinker]  # not a module of this one: its encoders are not trained here
        with torch.no_grad():
            for name, p in self.named_parameters():
                if p.ndim >= 2:
                    p.normal_(std=(0.3 if "o_proj" in name or "down" in name else 1.0) / p.shape[-1] ** 0.5)
            self.model.embed_tokens.weight.copy_(text_embeddings())
            self.lm_head.weight.normal_(std=0.02)
        self.model.embed_tokens.weight.requires_grad_(False)
        to_text = tokenizer()
        self._media = [to_text.convert_tokens_to_ids(token) for token in ("<|image_pad|>", "<|audio_pad|>")]

    def forward(self, batch: list[Example]) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean cross entropy of the targets, and which examples are right throughout."""
        ids = nn.utils.rnn.pad_sequence([torch.tensor(each.ids) for each in batch], True, 0)
        ids = functional.pad(ids, (0, -ids.shape[1] % 8))  # few shapes: each new one costs a CPU's kernels time
        lengths = torch.tensor([len(each.ids) for each in batch])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        wanted = torch.zeros_like(mask, dtype=torch.bool)
        for row, each in zip(wanted, batch, strict=True):
            row[: len(each.wanted)] = torch.tensor(each.wanted)
        rows = self.model.embed_tokens(ids)
        is_media = torch.isin(ids, torch.tensor(self._media))
        given = [row.float() for each in batch for row in each.media]
        if given:
            rows = rows.masked_scatter(is_media[..., None], torch.cat(given))
        grids = torch.tensor([[1, 2 * GRID, 2 * GRID]] * sum(each.image_count for each in batch)).view(-1, 3)
        columns = [columns_of(count) for each in batch for count in each.sounds]
        positions, _ = self._rope(
            ids,
            image_grid_thw=grids if len(grids) else None,
            attention_mask=mask,
            audio_seqlens=torch.tensor(columns) if columns else None,
        )
        hidden = self.model(inputs_embeds=rows, attention_mask=mask, position_ids=positions).last_hidden_state
        targets = wanted[:, 1:]
        logits = self.lm_head(hidden[:, :-1][targets])
        label = ids[:, 1:][targets]
        wrong = torch.zeros(len(batch)).index_add_(0, targets.nonzero()[:, 0], (logits.argmax(1) != label).float())
        return functional.cross_entropy(logits, label), wrong == 0


def columns_of(rows: int) -> int:
    """Columns of features for so many rows of the audio encoder."""
    return rows // 13 * 100 + rows % 13 * 8


def train() -> None:
    """Trains the language model: `STEPS` steps, resumable."""
    torch.manual_seed(0)
    bank, model = Bank.load(), LanguageModel()
    optimizers = loop.Optimizers(model, RATE, outer=("embed", "head"), muon_rate=MUON_RATE)

    def step_loss(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        draw = random.Random(f"thinker {step}")
        batch = sorted((draw_example(draw, bank) for _ in range(BATCH)), key=lambda each: len(each.ids))
        loss, right = torch.zeros(()), []
        for group in range(GROUPS):
            part, said = model(batch[group * BATCH // GROUPS : (group + 1) * BATCH // GROUPS])
            loss, right = loss + part / GROUPS, right + said.tolist()
        sorts = {"all": right}
        sorts["images"] = [said for said, each in zip(right, batch, strict=True) if each.image_count]
        sorts["audio"] = [said for said, each in zip(right, batch, strict=True) if each.sounds and not each.image_count]
        return loss, {name: sum(said) / max(len(said), 1) for name, said in sorts.items()}

    loop.run("thinker", model, optimizers, STEPS, step_loss)
