"""Image families whose prompt encoders also read images."""

# diffusers exports its classes lazily, which pyright does not take for an export:
# pyright: reportPrivateImportUsage=false

import json
from typing import Any

import diffusers
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cli.tiny import parts
from cli.tiny.parts import Size, Widths
from services.families.qwen3_omni.tiny.processor import make_tokenizer
from services.families.tiny_parts import token_ids

# Qwen-Image's pipelines put a fixed text before the prompt and drop the states of as many tokens as that has in the
# published vocabulary: 34 and 64. A vocabulary with these words has as many.
PREAMBLE_WORDS = (
    "Describe the image by detailing color shape size texture quantity text spatial relationships of objects and "
    "background key features input then explain how user's instruction should alter or modify Generate a new that "
    "meets requirements while maintaining consistency with original where appropriate"
)
TEXT_TOKENS = ("<|endoftext|>", "[gMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>", "<|image|>")
# {0} and {1} stand for the tokens around an image.
GLM_TEMPLATE = (
    "{%- for message in messages %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}{0}<|image|>{1}{%- else %}{{ part.text }}{%- endif %}"
    "{%- endfor %}{%- endfor %}"
)


def qwen_image(s: Size) -> diffusers.QwenImagePipeline:
    """Qwen-Image: text to image."""
    return diffusers.QwenImagePipeline(**_qwen_components(s, _qwen_tokenizer(s), s.vae_channels))


def qwen_image_edit(s: Size) -> diffusers.QwenImageEditPlusPipeline:
    """Qwen-Image-Edit-Plus: images and text to image."""
    tokenizer = _qwen_tokenizer(s)
    processor = transformers.Qwen2VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(size={"shortest_edge": 3_136, "longest_edge": 12_845_056}),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(),
        chat_template=parts.QWEN3_TEMPLATE,
    )
    vae_channels = s.vae_channels // 2  # few: an edit's images are encoded at a million pixels, whatever their size
    return diffusers.QwenImageEditPlusPipeline(**_qwen_components(s, tokenizer, vae_channels), processor=processor)


def _qwen_tokenizer(s: Size) -> transformers.Qwen2Tokenizer:
    # At the start of a line, behind and before brackets they have no space.
    words = (*(f" {word}" for word in PREAMBLE_WORDS.split()), "Describe", "color", " (", "),")
    return parts.qwen_tokenizer(s.words + 300, words)


def _qwen_components(s: Size, tokenizer: transformers.Qwen2Tokenizer, vae_channels: int) -> dict:
    return {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
        ),
        "vae": diffusers.AutoencoderKLQwenImage(**parts.video_vae_sizes(vae_channels, s.latent_channels)),
        "text_encoder": transformers.Qwen2_5_VLForConditionalGeneration(_qwen_config(s, tokenizer)),
        "tokenizer": tokenizer,
        "transformer": diffusers.QwenImageTransformer2DModel(
            **s.blocks,
            in_channels=4 * s.latent_channels,
            out_channels=s.latent_channels,
            joint_attention_dim=s.language[0],
            axes_dims_rope=s.rope,
        ),
    }


def _qwen_config(s: Size, tokenizer: transformers.Qwen2Tokenizer) -> transformers.Qwen2_5_VLConfig:
    tokens = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    ids = token_ids(tokenizer, {f"{name}_token_id": f"<|{token}|>" for name, token in tokens.items()})
    return transformers.Qwen2_5_VLConfig(
        text_config=parts.language_sizes(len(tokenizer), s.language)
        | {
            "bos_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "rope_parameters": _rope(theta=1e6),
        },
        vision_config=_vision(s.clip) | {"out_hidden_size": s.language[0], "fullatt_block_indexes": [s.clip[1] - 1]},
        **ids,
    )


def glm_image(s: Size) -> diffusers.GlmImagePipeline:
    """GLM-Image: an autoregressive model writes a rough image as tokens, a diffusion transformer refines it."""
    codebook, glyph = s.pick(128, 192), s.pick((48, 2, 4), (80, 3, 2))  # glyph: the encoder of quoted text
    tokenizer = _glm_tokenizer(s.words, codebook)
    return diffusers.GlmImagePipeline(
        processor=transformers.GlmImageProcessor(
            image_processor=transformers.GlmImageImageProcessor(
                patch_size=16,
                merge_size=1,
                temporal_patch_size=1,
                size={"shortest_edge": 32 * 32, "longest_edge": 2048 * 2048},
            ),
            tokenizer=tokenizer,
            chat_template=tokenizer.chat_template,
        ),
        **parts.t5(transformers.T5EncoderModel, transformers.ByT5Tokenizer(), glyph),
        vision_language_encoder=_glm_model(s, codebook, tokenizer),
        vae=parts.image_vae(s, **parts.latent_statistics(s.latent_channels)),
        transformer=diffusers.GlmImageTransformer2DModel(
            **s.blocks,
            in_channels=s.latent_channels,
            out_channels=s.latent_channels,
            text_embed_dim=glyph[0],
            time_embed_dim=64,
            condition_dim=32,
            prior_vq_quantizer_codebook_size=codebook,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"
        ),
    )


def _image_tokens(codebook: int) -> int:
    """The codebook, an image's start and end, and unused ones, as published."""
    return codebook + 16


def _glm_tokenizer(merges: int, codebook: int) -> transformers.PreTrainedTokenizerFast:
    """Image tokens first, then a byte-level BPE, then `TEXT_TOKENS`."""
    text = json.loads(make_tokenizer(merges).backend_tokenizer.to_str())["model"]
    image = [f"<|dit_token_{index}|>" for index in range(_image_tokens(codebook))]
    vocabulary = {token: index for index, token in enumerate([*image, *text["vocab"]])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(pair) for pair in text["merges"]]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in (*image, *TEXT_TOKENS)])
    start, end = image[codebook], image[codebook + 1]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=start,
        eos_token=end,
        pad_token="<|endoftext|>",
        padding_side="left",
        extra_special_tokens={"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"},
        chat_template=GLM_TEMPLATE.replace("{0}", start).replace("{1}", end),
    )


def _glm_model(
    s: Size, codebook: int, tokenizer: transformers.PreTrainedTokenizerFast
) -> transformers.GlmImageForConditionalGeneration:
    endings: dict[str, Any] = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = transformers.GlmImageConfig(
        text_config=parts.language_sizes(len(tokenizer), s.language)
        | endings
        | {"vision_vocab_size": _image_tokens(codebook), "rope_parameters": _rope(theta=1e4)},
        vision_config=_vision(s.clip) | {"image_size": 512},
        vq_config={"embed_dim": s.clip[0], "num_embeddings": codebook, "latent_channels": s.clip[0]},
        **token_ids(tokenizer, {"image_token_id": "<|image|>"}),
        image_start_token_id=codebook,
        image_end_token_id=codebook + 1,
    )
    model = transformers.GlmImageForConditionalGeneration(config)
    # The published model has learned to write nothing but the codebook's tokens until the image is full.
    suppressed = list(range(codebook, _image_tokens(codebook)))
    model.generation_config.update(suppress_tokens=suppressed, **endings)
    return model


def _vision(widths: Widths) -> dict[str, Any]:
    hidden, depth, heads = widths
    return {"depth": depth, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_heads": heads}


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, "mrope_section": [2, 3, 3]}
