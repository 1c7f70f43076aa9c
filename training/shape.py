"""Sizes and tokenizer of the shipped Qwen3-Omni, shared by all parts of its training."""

import json
import random
from functools import cache
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, trainers
from tokenizers.pre_tokenizers import ByteLevel

from services.demo_models import OMNI, resolve
from services.families.qwen3_omni.talker_text import DEFAULT_INSTRUCTIONS
from services.families.qwen3_omni.tiny import Qwen3OmniSizes
from services.families.qwen3_omni.tiny.model import model_config
from services.families.qwen3_omni.tiny.processor import ROLES, qwen_tokenizer
from services.families.tiny_sizes import TransformerShape
from training.scene_questions import seeing
from training.units import VOICES
from training.words import OUTSIDE, SMALL_TALK
from training.world import draw_dialogue

SIZES = Qwen3OmniSizes(
    merges=0,
    thinker=TransformerShape(192, 5, 6, 2, 32, 160, num_experts=4, num_experts_per_tok=2),
    accept_hidden_layer=3,
    encoder_width=128,
    vision_grid=8,
    talker=TransformerShape(192, 3, 6, 2, 32, 128, num_experts=4, num_experts_per_tok=2),
    predictor=TransformerShape(192, 2, 4, 2, 48, 384),
    code_groups=16,
    codebook=128,
    code2wav=TransformerShape(128, 3, 4, 4, 32, 384),
    code2wav_window=72,
    decoder_dim=144,
    upsample_rates=(8, 5, 4, 3),
    speakers=tuple(VOICES),
)
# As the gateway asks for a transcript.
TRANSCRIBE = (
    "Transcribe the audio into text.",
    "Transcribe the en audio into text.",
    "Transcribe the English audio into text.",
)
_CORPUS_SEED, _CORPUS_DIALOGUES = 1, 20_000


@cache
def tokenizer() -> transformers.Qwen2Tokenizer:
    """The shipped tokenizer. Its ids choose the embeddings that all parts are trained on, so it stays as it is."""
    return transformers.Qwen2Tokenizer.from_pretrained(resolve(OMNI))


def make_tokenizer() -> transformers.Qwen2Tokenizer:
    """A byte-level BPE in which every word of the world is one token, with a space before it or none."""
    draw = random.Random(_CORPUS_SEED)
    texts = [
        *ROLES * 50,
        *TRANSCRIBE * 50,
        DEFAULT_INSTRUCTIONS,
        *(question for questions, _ in SMALL_TALK for question in questions),
        *OUTSIDE * 20,
    ]
    for _ in range(_CORPUS_DIALOGUES):
        dialogue = draw_dialogue(draw, kinds={seeing: 1.0} if draw.random() < 0.1 else _kinds())
        for turn in dialogue.turns:
            texts += [turn.question, turn.answer, turn.question.lower(), turn.answer.lower()]
        texts += [json.dumps(tool) for tool in dialogue.tools]
    words = sorted(
        {word for text in texts for word in text.lower().split()} - {word for text in OUTSIDE for word in text.split()}
    )
    texts += [f" {word}" for word in words for _ in range(20)]
    byte_level = Tokenizer(models.BPE())
    empty: Any = transformers.Qwen2Tokenizer(vocab={}, merges=[])
    byte_level.pre_tokenizer = empty.backend_tokenizer.pre_tokenizer
    byte_level.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2_000, min_frequency=10, initial_alphabet=sorted(ByteLevel.alphabet()), show_progress=False
    )
    byte_level.train_from_iterator(texts, trainer)
    return qwen_tokenizer(byte_level)


def _kinds() -> dict:
    from training.world import KINDS, nonsense, outside

    return {kind: share for kind, share in KINDS.items() if kind not in (seeing, nonsense, outside)}


@cache
def config() -> Any:
    """A Qwen3OmniMoeConfig of the whole model, with settings that `quartet tiny` lacks."""
    whole: Any = model_config(SIZES, tokenizer())
    audio, vision = whole.thinker_config.audio_config, whole.thinker_config.vision_config
    audio.encoder_layers, audio.encoder_attention_heads, audio.downsample_hidden_size = 4, 4, 24
    audio.encoder_ffn_dim = 512
    vision.hidden_size, vision.intermediate_size, vision.depth, vision.num_heads = 96, 192, 3, 3
    vision.deepstack_visual_indexes = [1]
    return whole


def build(part: str) -> torch.nn.Module:
    """The thinker, talker or code2wav of the model, with weights drawn from torch's global generator.

    Args:
        part: "thinker", "talker" or "code2wav".
    """
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as reference

    whole = config()
    classes: dict[str, Any] = {
        "thinker": reference.Qwen3OmniMoeThinkerForConditionalGeneration,
        "talker": reference.Qwen3OmniMoeTalkerForConditionalGeneration,
        "code2wav": reference.Qwen3OmniMoeCode2Wav,
    }
    part_config = getattr(whole, f"{part}_config")
    part_config._attn_implementation = "sdpa"
    return classes[part]._from_config(part_config).float()


def text_embeddings() -> torch.Tensor:
    """The thinker's token embeddings: (vocabulary, width), of unit variance.

    They are never trained: so encoders, whose targets they are, talker and thinker are trained apart, in any order.
    """
    generator = torch.Generator().manual_seed(7)
    text = config().thinker_config.text_config
    return torch.randn(text.vocab_size, text.hidden_size, generator=generator)
