"""Qwen-Image and Qwen-Image-Edit-Plus."""

from dataclasses import dataclass
from typing import Any

from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import QwenImageEditPlusPipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from cli.tiny.diffusion.tokenizers import QWEN3_TEMPLATE, qwen_tokenizer
from cli.tiny.diffusion.vae import qwen_vae

# The pipelines put a fixed text before the prompt and drop the states of as many tokens as that has in the published
# vocabulary: 34 and 64. A vocabulary with these words has as many.
PREAMBLE_WORDS = (
    "Describe the image by detailing color shape size texture quantity text spatial relationships of objects and "
    "background key features input then explain how user's instruction should alter or modify Generate a new that "
    "meets requirements while maintaining consistency with original where appropriate"
)


@dataclass(frozen=True)
class _Size:
    merges: int
    text: tuple[int, int, int]  # hidden, layers, heads
    vision: tuple[int, int, int]
    layers: int
    heads: int
    rope: tuple[int, int, int]  # together the width of a head
    latent_channels: int
    vae_channels: int
    edit_vae_channels: int  # few: an edit's pictures are encoded at a million pixels, whatever their size


_SIZES = {
    "tiny": _Size(500, (64, 2, 4), (32, 2, 2), 2, 2, (8, 12, 12), 16, 8, 4),
    "small": _Size(600, (96, 3, 6), (48, 3, 3), 3, 3, (4, 6, 6), 8, 12, 6),
}


def qwen_image(size: str) -> QwenImagePipeline:
    """Text to image."""
    s = _SIZES[size]
    return QwenImagePipeline(**_components(s, _tokenizer(s), s.vae_channels))


def qwen_image_edit(size: str) -> QwenImageEditPlusPipeline:
    """Pictures and text to image."""
    s = _SIZES[size]
    tokenizer = _tokenizer(s)
    processor = Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(size={"shortest_edge": 3_136, "longest_edge": 12_845_056}),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=QWEN3_TEMPLATE,
    )
    return QwenImageEditPlusPipeline(**_components(s, tokenizer, s.edit_vae_channels), processor=processor)


def _tokenizer(s: _Size) -> Qwen2Tokenizer:
    # At the start of a line, behind and before brackets they have no space.
    words = (*(f" {word}" for word in PREAMBLE_WORDS.split()), "Describe", "color", " (", "),")
    return qwen_tokenizer(s.merges, words=words)


def _components(s: _Size, tokenizer: Qwen2Tokenizer, vae_channels: int) -> dict:
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
        ),
        "vae": qwen_vae(vae_channels, s.latent_channels),
        "text_encoder": Qwen2_5_VLForConditionalGeneration(_text_config(s, tokenizer)),
        "tokenizer": tokenizer,
        "transformer": QwenImageTransformer2DModel(
            in_channels=4 * s.latent_channels,
            out_channels=s.latent_channels,
            num_layers=s.layers,
            attention_head_dim=sum(s.rope),
            num_attention_heads=s.heads,
            joint_attention_dim=s.text[0],
            axes_dims_rope=s.rope,
        ),
    }


def _text_config(s: _Size, tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLConfig:
    hidden, layers, heads = s.text
    vision_hidden, depth, vision_heads = s.vision
    ids: dict[str, Any] = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in (
            ("image", "image_pad"),
            ("video", "video_pad"),
            ("vision_start", "vision_start"),
            ("vision_end", "vision_end"),
        )
    }
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "max_position_embeddings": 8192,
            "bos_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "depth": depth,
            "hidden_size": vision_hidden,
            "intermediate_size": 2 * vision_hidden,
            "num_heads": vision_heads,
            "out_hidden_size": hidden,
            "fullatt_block_indexes": [depth - 1],
        },
        **ids,
    )
