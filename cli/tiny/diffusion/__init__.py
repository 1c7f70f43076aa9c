"""Random diffusion checkpoints in diffusers' layout: real component classes, config keys and tokenizers, small sizes.

`DiffusionPipeline.from_pretrained` loads them as it loads the published ones; only sizes and weights differ.
"""

import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

# Architecture -> module and function that builds its pipeline, `(size: str) -> DiffusionPipeline`.
FAMILIES = {
    "sd3": ("stable_diffusion", "sd3"),
    "flux": ("flux", "flux"),
    "flux2-klein": ("flux2", "klein"),
    "qwen-image": ("qwen_image", "qwen_image"),
    "qwen-image-edit": ("qwen_image", "qwen_image_edit"),
    "z-image": ("z_image", "z_image"),
    "glm-image": ("glm_image", "glm_image"),
    "wan": ("wan", "wan"),
    "wan-i2v": ("wan", "wan_i2v"),
    "stable-audio": ("stable_audio", "stable_audio"),
}


def make_diffusion_checkpoint(out: Path, arch: str, seed: int, size: str) -> Path:
    """Writes a checkpoint into the directory `out` and returns it.

    Args:
        out: made if needed; files of the same names are replaced.
        arch: a key of `FAMILIES`.
        seed: of the weights. Tokenizers and configs depend on the size only.
        size: "tiny" or "small".

    Raises:
        KeyError: no such architecture or size.
    """
    module, function = FAMILIES[arch]
    import torch
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging

    from cli.tiny.diffusion.weights import randomize_pipeline

    build: Callable = getattr(import_module(f"cli.tiny.diffusion.{module}"), function)
    for library in (logging, diffusers_logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        pipeline = build(size)
        randomize_pipeline(pipeline)
        pipeline.save_pretrained(out)
    return out


__all__ = ["FAMILIES", "make_diffusion_checkpoint"]
