"""GLM-Image: an autoregressive model writes a rough picture as tokens, a diffusion transformer paints over it."""

import json
from dataclasses import dataclass
from typing import Any

from diffusers.models.transformers.transformer_glm_image import GlmImageTransformer2DModel
from diffusers.pipelines.glm_image.pipeline_glm_image import GlmImagePipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    ByT5Tokenizer,
    GlmImageConfig,
    GlmImageForConditionalGeneration,
    GlmImageImageProcessor,
    GlmImageProcessor,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from cli.tiny.diffusion.encoders import t5_sizes
from cli.tiny.diffusion.vae import image_vae
from services.families.qwen3_omni.tiny.processor import make_tokenizer

BYT5_VOCABULARY = 384  # 3 special tokens, the bytes, 125 extra ids
TEXT_TOKENS = ("<|endoftext|>", "[gMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>", "<|image|>")
# {0} and {1} stand for the tokens around a picture.
TEMPLATE = (
    "{%- for message in messages %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}{0}<|image|>{1}{%- else %}{{ part.text }}{%- endif %}"
    "{%- endfor %}{%- endfor %}"
)


@dataclass(frozen=True)
class _Size:
    merges: int
    text: tuple[int, int, int]  # hidden, layers, heads of the autoregressive model
    vision: tuple[int, int, int]
    codebook: int
    glyph: tuple[int, int, int]  # of the encoder of quoted text
    layers: int
    heads: int
    head_dim: int
    latent_channels: int
    vae_channels: int

    @property
    def picture_tokens(self) -> int:
        """Ids of the codebook, start and end of a picture, and as in the published model some that mean nothing."""
        return self.codebook + 16


_SIZES = {
    "tiny": _Size(200, (64, 2, 4), (32, 2, 2), 128, (48, 2, 4), 2, 2, 32, 16, 8),
    "small": _Size(300, (96, 3, 6), (48, 3, 3), 192, (80, 3, 2), 3, 3, 16, 8, 12),
}


def glm_image(size: str) -> GlmImagePipeline:
    """Text, and pictures if wanted, to image."""
    s = _SIZES[size]
    tokenizer = _tokenizer(s)
    return GlmImagePipeline(
        tokenizer=ByT5Tokenizer(),
        processor=GlmImageProcessor(
            image_processor=GlmImageImageProcessor(
                patch_size=16,
                merge_size=1,
                temporal_patch_size=1,
                size={"shortest_edge": 32 * 32, "longest_edge": 2048 * 2048},
            ),
            tokenizer=tokenizer,
            chat_template=tokenizer.chat_template,
        ),
        text_encoder=T5EncoderModel(T5Config(**t5_sizes(BYT5_VOCABULARY, *s.glyph))),
        vision_language_encoder=_language_model(s, tokenizer),
        vae=image_vae(s.vae_channels, s.latent_channels, statistics=True),
        transformer=GlmImageTransformer2DModel(
            in_channels=s.latent_channels,
            out_channels=s.latent_channels,
            num_layers=s.layers,
            attention_head_dim=s.head_dim,
            num_attention_heads=s.heads,
            text_embed_dim=s.glyph[0],
            time_embed_dim=64,
            condition_dim=32,
            prior_vq_quantizer_codebook_size=s.codebook,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"
        ),
    )


def _tokenizer(s: _Size) -> PreTrainedTokenizerFast:
    """Tokens of pictures first, then a byte-level BPE, then `TEXT_TOKENS`."""
    text = json.loads(make_tokenizer(s.merges).backend_tokenizer.to_str())["model"]
    picture = [f"<|dit_token_{index}|>" for index in range(s.picture_tokens)]
    vocabulary = {token: index for index, token in enumerate([*picture, *text["vocab"]])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(pair) for pair in text["merges"]]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in (*picture, *TEXT_TOKENS)])
    start, end = picture[s.codebook], picture[s.codebook + 1]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=start,
        eos_token=end,
        pad_token="<|endoftext|>",
        padding_side="left",
        extra_special_tokens={"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"},
        chat_template=TEMPLATE.replace("{0}", start).replace("{1}", end),
    )


def _language_model(s: _Size, tokenizer: PreTrainedTokenizerFast) -> GlmImageForConditionalGeneration:
    hidden, layers, heads = s.text
    image_token_id: Any = tokenizer.convert_tokens_to_ids("<|image|>")
    vision_hidden, depth, vision_heads = s.vision
    config = GlmImageConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "vision_vocab_size": s.picture_tokens,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "max_position_embeddings": 8192,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "depth": depth,
            "hidden_size": vision_hidden,
            "intermediate_size": 2 * vision_hidden,
            "num_heads": vision_heads,
            "image_size": 512,
        },
        vq_config={"embed_dim": vision_hidden, "num_embeddings": s.codebook, "latent_channels": vision_hidden},
        image_token_id=image_token_id,
        image_start_token_id=s.codebook,
        image_end_token_id=s.codebook + 1,
    )
    model = GlmImageForConditionalGeneration(config)
    # The published model has learned to write nothing but the codebook's tokens until the picture is full.
    model.generation_config.suppress_tokens = list(range(s.codebook, s.picture_tokens))
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model
