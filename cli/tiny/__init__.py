"""Small random checkpoints with the real architectures of the models that are served."""

import warnings
from pathlib import Path

from cli.tiny import diffusion
from services.families import FAMILIES

_OF_STAGES = {family.name.replace("_", "-"): family for family in FAMILIES if family.has("tiny")}
ARCHS = (*_OF_STAGES, *diffusion.FAMILIES)


def make_checkpoint(out: Path, seed: int, size: str, arch: str = ARCHS[0]) -> Path:
    """Writes a checkpoint into the directory `out` and returns it.

    Args:
        out: made if needed; files of the same names are replaced.
        seed: of the weights. Tokenizers and configs depend on architecture and size only.
        size: "tiny" or "small": they differ in every dimension and special id.
        arch: one of `ARCHS`.

    Raises:
        KeyError: no such architecture or size.
    """
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    out.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        if arch in diffusion.FAMILIES:
            diffusion.write_checkpoint(out, arch, size)
        else:
            _OF_STAGES[arch].part("tiny").write_checkpoint(out, size)
    return out
