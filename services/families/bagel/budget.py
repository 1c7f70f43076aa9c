"""GPU memory of a checkpoint, from its config files and the shapes of its tensors. Imports no torch."""

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from services.families.any_model import budget as any_model
from services.families.bagel.files import LLM
from services.families.bagel.files import VAE_WEIGHTS as VAE_WEIGHTS
from services.families.bagel.files import WEIGHTS as WEIGHTS
from services.sizes import ContextSizes, PipelineSizes, Sizes, kv_bytes, layer_kv_bytes

INDEX = LLM
"""The file by which a pipeline's checkpoint is known."""
_OF_PAINTING = ("_moe_gen", "latent_pos_embed.", "llm2vae.", "vae2llm.", "time_embedder.")  # in names; no thinker's
_OF_VAE = ("encoder.", "decoder.")  # names begin so
_READ_ONLY = ("language_model.lm_head.", "vit_model.", "vit_pos_embed.", "connector.")  # no step calls these
_STEPS_ONLY = ("llm2vae.",)
_LATENT_PLACES, _PATCH_PLACES = "latent_pos_embed.pos_embed", "vit_pos_embed.pos_embed"
_BRANCHES = 3  # of guidance: all that was said, that without the text, that without pictures
_MARKS = 2  # tokens around a picture, each time that it is read
_PROMPT_TOKENS = 128


def sizes(config: Mapping[str, Any], tensors: Iterable[tuple[str, int]]) -> Sizes:
    """What a thinker takes. `tensors`: (name, bytes) of all in the checkpoint."""
    return any_model.sizes(config, ((name, size) for name, size in tensors if read_by_thinker(name)))


def read_by_thinker(name: str) -> bool:
    """Whether a thinker loads the tensor of this name."""
    return not name.startswith(_OF_VAE) and not any(part in name for part in _OF_PAINTING)


def pipeline(
    config: Mapping[str, Any], weights: Mapping[str, tuple[int, ...]], vae: Mapping[str, tuple[int, ...]], element: int
) -> PipelineSizes:
    """What dit and encoder take.

    Args:
        config: llm_config.json.
        weights, vae: shapes of the tensors of `WEIGHTS` and of `VAE_WEIGHTS`, by name.
        element: bytes of a number of the loaded weights, whatever the files have.

    Raises:
        KeyError: a key or a tensor is missing.
    """
    parts: dict[str, int] = dict.fromkeys(("reader", "transformer", "denoiser", "vae_encoder", "vae_decoder"), 0)
    for name, shape in weights.items():
        read_only, steps_only = name.startswith(_READ_ONLY), name.startswith(_STEPS_ONLY)
        parts["reader" if read_only else "denoiser" if steps_only else "transformer"] += prod(shape) * element
    for name, shape in vae.items():
        parts["vae_encoder" if name.startswith("encoder.") else "vae_decoder"] += prod(shape) * element
    latents, patches = weights[_LATENT_PLACES][0], weights[_PATCH_PLACES][0]
    return PipelineSizes(
        parts,
        of_encoder=frozenset({"reader", "transformer", "vae_encoder"}),
        beside_encoder=frozenset({"transformer", "denoiser", "vae_encoder", "vae_decoder"}),
        context=ContextSizes(
            per_token=kv_bytes(config, element),
            tokens=latents + patches + 2 * _MARKS + _PROMPT_TOKENS,
            branches=_BRANCHES,
            of_layer=layer_kv_bytes(config, element),
            denoised_tokens=latents + _MARKS,
            what="edits of the largest picture",
        ),
    )
