"""The toy's talker: a letter a frame, one code a frame."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from services.talker.family import (
    TEXT_EMBEDDINGS,
    Prompt,
    SamplingDefaults,
    TalkerFamily,
    TalkerSpec,
    Text,
    TransformerSpec,
    WeightNames,
)

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
    return TalkerFamily(spec, WEIGHTS, text_input=partial(_prompt, voices, config["begin"]))


def _prompt(voices: dict[str, int], begin: int, text: str, voice: str) -> tuple[Prompt, Text]:
    """A row of the voice, then one of the sign that begins and the first letter."""
    letters = list(text.encode())
    prompt = Prompt(
        text_ids=torch.tensor([-1, *letters[:1]]),
        codes=torch.tensor([voices[voice], begin][: 1 + len(letters[:1])]),
        positions=torch.arange(1 + len(letters[:1]))[:, None].expand(-1, 3),
    )
    return prompt, Text(letters)
