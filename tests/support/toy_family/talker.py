"""The toy's talker: a letter a frame, one code a frame."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from services.talker.family import (
    TEXT_EMBEDDINGS,
    SamplingDefaults,
    TalkerFamily,
    TalkerSpec,
    TransformerSpec,
    WeightNames,
)
from services.talker.inputs import Delivery, Prompt, Text

LETTERS = 256  # a letter is a byte; two more ids follow
END_OF_TEXT, SILENCE = LETTERS, LETTERS + 1

WEIGHTS = WeightNames(
    prefixes={
        "letters.weight": TEXT_EMBEDDINGS,
        "sounds.": "model.codec_embedding.",
        "blocks.": "model.layers.",
        "last_norm.": "model.norm.",
        "to_sound.": "codec_head.",
    },
    stored_dtype_of="to_sound.weight",
)


def read_talker(config: dict[str, Any], folder: Path) -> TalkerFamily:
    """As `services.talker.family.TalkerModule`."""
    sounds, voices = config["sounds"], config["voices"]
    spec = TalkerSpec(
        talker=TransformerSpec(
            layers=config["depth"],
            hidden=config["width"],
            heads=config["heads"],
            kv_heads=config["heads"] // 2,
            head_dim=config["width"] // config["heads"],
            intermediate=2 * config["width"],
            vocab=sounds + config["signs"],
            norm_eps=1e-6,
            rope_theta=10_000.0,
            activation="silu",
            qkv_bias=True,
            qk_norm=False,
        ),
        num_code_groups=1,
        max_positions=1024,
        text_vocab=LETTERS + 2,
        speakers=tuple(voices),
        after_text=(END_OF_TEXT, SILENCE),
        end_codes=frozenset(config["ends"]),
        suppressed_codes=frozenset(range(sounds, sounds + config["signs"])) - set(config["ends"]),
        seen_codes=frozenset(config["heard"]),
        min_frames=config["shortest"],
        defaults=SamplingDefaults(temperature=0.8, top_k=20, top_p=1.0, repetition_penalty=1.3, max_frames=500),
    )
    return TalkerFamily(spec, WEIGHTS, text_input=partial(Letters, voices, config["begin"]))


class Letters:
    """A `services.talker.inputs.TextInput`: a row of the voice, then the sign that begins and the first letter."""

    def __init__(self, voices: dict[str, int], begin: int, delivery: Delivery) -> None:
        self._codes = [voices[delivery.speaker], begin]
        self._letters: list[int] = []
        self.is_empty, self.tokens = False, 0

    def add(self, text: str) -> None:
        self._letters += text.encode()
        self.tokens += len(text.encode())

    def finish(self) -> None:
        self.is_empty = not self._letters

    @property
    def ready(self) -> bool:
        return bool(self._letters)

    def take_prompt(self) -> Prompt:
        return Prompt(
            text_ids=torch.tensor([-1, self._letters[0]]),
            codes=torch.tensor(self._codes),
            positions=torch.arange(2)[:, None].expand(-1, 3),
        )

    def take_text(self) -> Text:
        letters, self._letters = self._letters, []
        return Text(letters)
