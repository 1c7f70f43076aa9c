"""Small random checkpoints of models that write down speech, and also answer messages."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from services.families.qwen3_omni.tiny.processor import SPECIAL_TOKENS, make_tokenizer
from services.families.tiny_parts import prefer_text, randomize
from tests.support.kept import kept_folder
from tests.support.weights import text_models

SOUNDS = {"audio_token": "<|audio_pad|>", "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"}
# As published, it writes systems' texts and sounds, and leaves out what users write.
DEAF_TO_WORDS = (
    "{% set said = namespace(system='', sounds='') %}{% for message in messages %}"
    "{% if message.role == 'system' %}"
    "{% if message.content is string %}{% set said.system = said.system + message.content %}"
    "{% else %}{% for part in message.content %}{% if part.type == 'text' %}"
    "{% set said.system = said.system + part.text %}{% endif %}{% endfor %}{% endif %}"
    "{% elif message.content is not string %}{% for part in message.content %}{% if part.type == 'audio' %}"
    "{% set said.sounds = said.sounds + '<|audio_start|><|audio_pad|><|audio_end|>' %}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}<|im_start|>system\n{{ said.system }}<|im_end|>\n"
    "<|im_start|>user\n{{ said.sounds }}<|im_end|>\n{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEARING = text_models.VISION_CHATML.replace(
    "{% if part.type == 'image' %}", "{% if part.type == 'audio' %}<|audio_pad|>{% elif part.type == 'image' %}"
)


def qwen3_asr() -> tuple[Any, Any]:
    """Whatever it hears, its answer begins with the language and a mark."""
    tokenizer: Any = make_tokenizer(200, special_tokens=SPECIAL_TOKENS)
    tokenizer.add_tokens(transformers.AddedToken("<asr_text>", special=False, normalized=False))
    for name, token in SOUNDS.items():
        setattr(tokenizer, name, token)
    processor = transformers.Qwen3ASRProcessor(
        feature_extractor=transformers.Qwen3ASRFeatureExtractor(), tokenizer=tokenizer, chat_template=DEAF_TO_WORDS
    )
    encoder = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 128}
    return processor, transformers.Qwen3ASRConfig(
        text_config={"model_type": "qwen3", **text_models.sizes(tokenizer, head_dim=32)},
        audio_config={"model_type": "qwen3_asr_encoder", "output_dim": 64, **encoder},
        audio_token_id=tokenizer.convert_tokens_to_ids(SOUNDS["audio_token"]),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )


def glm_asr() -> tuple[Any, Any]:
    """It answers like any other model that hears."""
    tokenizer: Any = make_tokenizer(200)
    processor = transformers.GlmAsrProcessor(
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=128),
        tokenizer=tokenizer,
        audio_token=SOUNDS["audio_token"],
        chat_template=HEARING,
    )
    encoder = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    return processor, transformers.GlmAsrConfig(
        text_config={"model_type": "llama", **text_models.sizes(tokenizer)},
        audio_config={"model_type": "glmasr_encoder", **encoder},
        audio_token_id=tokenizer.convert_tokens_to_ids(SOUNDS["audio_token"]),
        tie_word_embeddings=False,
    )


_QWEN3_ASR_NAMES = {
    "model.audio_tower.": "thinker.audio_tower.",
    "model.multi_modal_projector.linear_1.": "thinker.audio_tower.proj1.",
    "model.multi_modal_projector.linear_2.": "thinker.audio_tower.proj2.",
    "model.language_model.": "thinker.model.",
    "lm_head.": "thinker.lm_head.",
}
SPEECH: Mapping[str, Callable[[], tuple[Any, Any]]] = {make.__name__: make for make in (qwen3_asr, glm_asr)}


def speech_checkpoint(name: str) -> Path:
    """One of `SPEECH`, as transformers writes it."""

    def make(out: Path) -> None:
        processor, config = SPEECH[name]()
        tokenizer = processor.tokenizer
        torch.manual_seed(0)
        model: Any = transformers.AutoModelForMultimodalLM.from_config(config).float()
        randomize(model)
        prefer_text(model.get_output_embeddings().weight, tokenizer, tokenizer.all_special_tokens)
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.save_pretrained(out)
        processor.save_pretrained(out)
        _name(out / "tokenizer_config.json", SOUNDS)

    return kept_folder(make, "speech", name, Path(__file__), Path(text_models.__file__))


def published_checkpoint(name: str) -> Path:
    """The same, as it is published: with the names that vLLM knows."""
    written = speech_checkpoint(name)

    def make(out: Path) -> None:
        shutil.copytree(written, out, dirs_exist_ok=True)
        if name == "glm_asr":
            text_models.name_as_published(out / "model.safetensors")
            return
        config = json.loads((out / "config.json").read_text())
        thinker = {key: config.pop(key) for key in ("audio_config", "text_config", "audio_token_id")}
        (out / "config.json").write_text(json.dumps(config | {"thinker_config": thinker}))
        tensors = load_file(out / "model.safetensors")
        for begins, published in _QWEN3_ASR_NAMES.items():
            tensors = {key.replace(begins, published): tensor for key, tensor in tensors.items()}
        save_file(tensors, out / "model.safetensors", {"format": "pt"})

    return kept_folder(make, "published speech", name, written, Path(__file__))


def reference(name: str) -> tuple[Any, Any]:
    """transformers' processor and model, in float32."""
    checkpoint = speech_checkpoint(name)
    model: Any = transformers.AutoModelForMultimodalLM.from_pretrained(checkpoint, dtype=torch.float32)
    processor: Any = transformers.AutoProcessor.from_pretrained(checkpoint)
    return processor, model.eval()


def _name(file: Path, tokens: Mapping[str, str]) -> None:
    """Writes the tokenizer's names of tokens, which `save_pretrained` leaves out."""
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(tokens)))
