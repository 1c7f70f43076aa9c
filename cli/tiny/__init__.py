"""Small random checkpoints with the architectures, config keys and tokenizers of the served models."""

import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from services.registry import families

_OF_STAGES: dict[str, Callable[[Path, str], None]] = {}
for _family in families():
    if _family.has("tiny"):
        _OF_STAGES |= _family.part("tiny").ARCHS
# Modules here -> diffusion's architectures, each a function of its name, `(size: Size) -> DiffusionPipeline`.
_MODULES = {
    "image": ("sd3", "flux", "flux2-klein", "z-image"),
    "vision_language": ("qwen-image", "qwen-image-edit", "glm-image"),
    "video_audio": ("wan", "wan-i2v", "stable-audio"),
}
FAMILIES = {arch: module for module, archs in _MODULES.items() for arch in archs}
# Architectures that stages of several kinds serve -> a module here, and its function, `(out: Path, size: str)`.
_OF_SEVERAL = {"cosmos3": ("cosmos3", "write_cosmos3")}
ARCHS = (*_OF_STAGES, *FAMILIES, *_OF_SEVERAL)


def make_checkpoint(out: Path, seed: int, size: str, arch: str = ARCHS[0]) -> Path:
    """Writes a checkpoint into `out` and returns it.

    Args:
        seed: of the weights. Tokenizers and configs depend on architecture and size only.
        size: "tiny" or "small": they differ in every dimension and special id.
    """
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    out.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        if arch in FAMILIES:
            _write_diffusion(out, arch, size)
        elif arch in _OF_SEVERAL:
            module, function = _OF_SEVERAL[arch]
            getattr(import_module(f"cli.tiny.{module}"), function)(out, size)
        else:
            _OF_STAGES[arch](out, size)
    return out


def _write_diffusion(out: Path, arch: str, size: str) -> None:
    from diffusers.utils import logging

    from cli.tiny.parts import SIZES
    from cli.tiny.weights import randomize_pipeline

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    build = getattr(import_module(f"cli.tiny.{FAMILIES[arch]}"), arch.replace("-", "_"))
    pipeline = build(SIZES[size])
    randomize_pipeline(pipeline)
    pipeline.save_pretrained(out)
