"""Cosmos 3: one checkpoint that makes images, videos and sound, and whose understanding side writes text.

Its folders are those of a pipeline of diffusers. Beside them are a vision encoder, `config.json` and a processor: with
these, transformers and vLLM read the layers that understand out of the denoiser, and skip the others.
"""

# diffusers exports its classes lazily, which pyright does not take for an export:
# pyright: reportPrivateImportUsage=false

from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from cli.tiny import parts
from cli.tiny.parts import Size
from cli.tiny.weights import LOUDNESS, randomize_pipeline
from services.families.qwen3_omni.tiny.processor import CHAT_TEMPLATE, PATCH, SPECIAL_TOKENS, make_tokenizer
from services.families.tiny_parts import (
    padded_vocabulary,
    prefer_text,
    randomize,
    rope_scaling,
    token_ids,
    vision_config,
    write_json,
)

_LAST_TOKEN = "</think>"  # those after it are for sound that is heard
_THETA = 1e6
_EPSILON = 1e-6
_POSITIONS = 4096
_VISION_LEVELS = [1, 2]  # layers of the vision encoder whose states go into the first layers of the language model
_INDEX = "model.safetensors.index.json"
_MARKS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def write_cosmos3(out: Path, size: str) -> None:
    """Writes a checkpoint into `out`, with weights from torch's global generator: "tiny" makes videos with sound,
    "small" silent ones. Its safety checker is off."""
    s = parts.SIZES[size]
    tokenizer = make_tokenizer(s.words, special_tokens=SPECIAL_TOKENS[: SPECIAL_TOKENS.index(_LAST_TOKEN) + 1])
    tokenizer.chat_template = CHAT_TEMPLATE.read_text()
    pipeline = _pipeline(s, tokenizer)
    randomize_pipeline(pipeline)
    prefer_text(pipeline.transformer.lm_head.weight, tokenizer, tokenizer.all_special_tokens)
    if pipeline.sound_tokenizer is not None:
        _set_loudness(pipeline.sound_tokenizer)
    pipeline.save_pretrained(out)
    _write_understanding(out, s, tokenizer)


def _text_sizes(s: Size, tokenizer: Any) -> dict[str, Any]:
    """Of both towers; as diffusers and transformers call them."""
    hidden, layers, heads = s.language
    return {
        "vocab_size": padded_vocabulary(len(tokenizer)),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": sum(s.rope),
        "rms_norm_eps": _EPSILON,
    }


def _pipeline(s: Size, tokenizer: Any) -> diffusers.Cosmos3OmniPipeline:
    latents, sound = s.latent_channels, s.pick(12, 0)
    sounds: dict[str, Any] = {"sound_gen": True, "sound_dim": sound} if sound else {}
    head = sum(s.rope)
    of_vae: dict[str, Any] = parts.video_vae_sizes(s.vae_channels, latents) | {"dim_mult": [1, 2, 2, 2]}
    transformer = diffusers.Cosmos3OmniTransformer(
        **_text_sizes(s, tokenizer),
        rope_scaling=rope_scaling(head),
        rope_theta=_THETA,
        latent_channel=latents,
        latent_patch_size=2,
        patch_latent_dim=4 * latents,
        **sounds,
    )
    return diffusers.Cosmos3OmniPipeline(
        transformer=transformer,
        text_tokenizer=tokenizer,
        vae=diffusers.AutoencoderKLWan(
            **of_vae,
            decoder_base_dim=s.vae_channels,
            is_residual=True,
            in_channels=12,  # pixels, two by two
            out_channels=12,
            patch_size=2,
            scale_factor_spatial=16,
        ),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=s.pick(3.0, 5.0)
        ),
        sound_tokenizer=_sound_tokenizer(s, sound) if sound else None,
        enable_safety_checker=False,
    )


def _sound_tokenizer(s: Size, latents: int) -> diffusers.Cosmos3AVAEAudioTokenizer:
    """Stereo, of which only the decoder is there: no sound is read."""
    return diffusers.Cosmos3AVAEAudioTokenizer(
        sampling_rate=12_000,
        vocoder_input_dim=latents,
        dec_dim=s.vae_channels,
        dec_c_mults=(1, 2, 2),
        dec_strides=(4, 6, 10),
        encoder_enabled=False,
    )


@torch.no_grad()
def _set_loudness(tokenizer: Any) -> None:
    """Scales the last convolution so that decoded noise has a standard deviation of `LOUDNESS`."""
    gain = tokenizer.decoder.conv2.weight_g
    gain.mul_(1e-3)  # far from clipping the scale is linear
    gain.mul_(LOUDNESS / tokenizer.decode(torch.randn(1, tokenizer.config.vocoder_input_dim, 32)).std())


def _write_understanding(out: Path, s: Size, tokenizer: Any) -> None:
    """What transformers and vLLM read beside the denoiser's weights."""
    ids, text = token_ids(tokenizer, _MARKS), _text_sizes(s, tokenizer)
    rope = rope_scaling(text["head_dim"]) | {"mrope_interleaved": True, "rope_theta": _THETA}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = transformers.Cosmos3OmniConfig(
        text_config=text | {"rope_parameters": rope, "max_position_embeddings": _POSITIONS} | ends,
        vision_config=vision_config(s.clip[0], text["hidden_size"])
        | {"num_position_embeddings": 64, "deepstack_visual_indexes": _VISION_LEVELS, "patch_size": 16},
        architectures=["Cosmos3ForConditionalGeneration"],  # vLLM's name, as published
        dtype="float32",
        **ids,
    )
    vision: Any = Qwen3VLVisionModel._from_config(config.vision_config)
    randomize(vision)
    folder = out / "vision_encoder"
    folder.mkdir()
    save_file({name: each.contiguous() for name, each in vision.state_dict().items()}, folder / "model.safetensors")
    config.save_pretrained(out)
    transformers.GenerationConfig(**ends).save_pretrained(out)  # type: ignore[arg-type]
    transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(
            size={"shortest_edge": 3_136, "longest_edge": 65_536}, **PATCH
        ),
        video_processor=transformers.Qwen3VLVideoProcessor(**PATCH),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(out)
    _write_index(out)


def _write_index(out: Path) -> None:
    """Says which folder has which weights of the understanding side, for transformers."""
    places: dict[str, str] = {}
    for file in sorted([*(out / "transformer").glob("*.safetensors"), *(out / "vision_encoder").glob("*.safetensors")]):
        with safe_open(file, "pt") as weights:
            places |= dict.fromkeys(weights.keys(), file.relative_to(out).as_posix())
    size = sum((out / file).stat().st_size for file in set(places.values()))
    write_json(out / _INDEX, {"metadata": {"total_size": size}, "weight_map": places})
