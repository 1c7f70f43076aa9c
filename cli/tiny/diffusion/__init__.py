"""Random diffusion checkpoints in diffusers' layout: real component classes, config keys and tokenizers, small sizes.

`DiffusionPipeline.from_pretrained` loads them as it loads the published ones; only sizes and weights differ.
"""

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


def write_checkpoint(out: Path, arch: str, size: str) -> None:
    """Writes a checkpoint into the directory `out`; weights are drawn from torch's global generator.

    Args:
        out: files of the same names are replaced.
        arch: a key of `FAMILIES`.
        size: "tiny" or "small".

    Raises:
        KeyError: no such architecture or size.
    """
    module, function = FAMILIES[arch]
    from diffusers.utils import logging

    from cli.tiny.diffusion.weights import randomize_pipeline

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    pipeline = getattr(import_module(f"cli.tiny.diffusion.{module}"), function)(size)
    randomize_pipeline(pipeline)
    pipeline.save_pretrained(out)
