"""Random diffusion checkpoints in diffusers' layout: real component classes, config keys and tokenizers, small sizes.

`DiffusionPipeline.from_pretrained` loads them as it loads the published ones; only sizes and weights differ.
"""

from importlib import import_module
from pathlib import Path

# Architecture -> module and function that builds its pipeline, `(size: Size) -> DiffusionPipeline`.
FAMILIES = {
    "sd3": ("image", "sd3"),
    "flux": ("image", "flux"),
    "flux2-klein": ("image", "klein"),
    "qwen-image": ("vision_language", "qwen_image"),
    "qwen-image-edit": ("vision_language", "qwen_image_edit"),
    "z-image": ("image", "z_image"),
    "glm-image": ("vision_language", "glm_image"),
    "wan": ("video_audio", "wan"),
    "wan-i2v": ("video_audio", "wan_i2v"),
    "stable-audio": ("video_audio", "stable_audio"),
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

    from cli.tiny.diffusion.parts import SIZES
    from cli.tiny.diffusion.weights import randomize_pipeline

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    pipeline = getattr(import_module(f"cli.tiny.diffusion.{module}"), function)(SIZES[size])
    randomize_pipeline(pipeline)
    pipeline.save_pretrained(out)
