"""Names of weights: ours -> those of the published files `ema.safetensors` and `ae.safetensors`."""

import re

_PLACES = (
    (r"^mot\.layers\.(\d+)\.(und|gen)\.([qkvo]_proj|[qk]_norm)\.", r"language_model.model.layers.\1.self_attn.\3@\2."),
    (r"^mot\.layers\.(\d+)\.(und|gen)\.(\w+_proj)\.", r"language_model.model.layers.\1.mlp@\2.\3."),
    (r"^mot\.layers\.(\d+)\.(und|gen)\.(\w+layernorm)\.", r"language_model.model.layers.\1.\3@\2."),
    (r"^mot\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^latents\.time_embedder\.", "time_embedder.mlp."),
    (r"^latents\.pos_embed$", "latent_pos_embed.pos_embed"),
    (r"^latents\.", ""),
    (r"^vision\.(patch|position)_", r"vit_model.vision_model.embeddings.\1_"),
    (r"^vision\.layers\.", "vit_model.vision_model.encoder.layers."),
    (r"^vision\.", "vit_model.vision_model."),
    (r"^connector\.positions\.weight$", "vit_pos_embed.pos_embed"),
)
_KINDS = (("@und", ""), ("@gen", "_moe_gen"))
# diffusers' VAE is FLUX.1's under other names; its levels of the decoder are counted from the other end.
_VAE_PLACES = (
    (r"^(encoder|decoder)\.mid_block\.resnets\.0\.", r"\1.mid.block_1."),
    (r"^(encoder|decoder)\.mid_block\.resnets\.1\.", r"\1.mid.block_2."),
    (r"^(encoder|decoder)\.mid_block\.attentions\.0\.group_norm\.", r"\1.mid.attn_1.norm."),
    (r"^(encoder|decoder)\.mid_block\.attentions\.0\.to_([qkv])\.", r"\1.mid.attn_1.\2."),
    (r"^(encoder|decoder)\.mid_block\.attentions\.0\.to_out\.0\.", r"\1.mid.attn_1.proj_out."),
    (r"^encoder\.down_blocks\.(\d+)\.resnets\.", r"encoder.down.\1.block."),
    (r"^encoder\.down_blocks\.(\d+)\.downsamplers\.0\.", r"encoder.down.\1.downsample."),
    (r"\.conv_shortcut\.", ".nin_shortcut."),
    (r"\.conv_norm_out\.", ".norm_out."),
)
_UP = re.compile(r"^decoder\.up_blocks\.(\d+)\.(resnets|upsamplers\.0)\.")


def published(name: str) -> str:
    """The name, in `ema.safetensors`, of a weight of reader or denoiser."""
    for pattern, place in _PLACES:
        name, found = re.subn(pattern, place, name)
        if found:
            break
    for kind, suffix in _KINDS:
        name = name.replace(kind, suffix)
    return name


def published_vae(name: str, levels: int) -> str:
    """The name, in `ae.safetensors`, of a weight of diffusers' AutoencoderKL with so many levels."""
    if (up := _UP.match(name)) is not None:
        part = "block" if up[2] == "resnets" else "upsample"
        name = f"decoder.up.{levels - 1 - int(up[1])}.{part}.{name[up.end() :]}"
    for pattern, place in _VAE_PLACES:
        name = re.sub(pattern, place, name)
    return name
