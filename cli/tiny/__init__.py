"""Random checkpoints with Qwen3-Omni's real architecture: config keys, weight names, tokenizer, template, processors.

The loading code that serves the published checkpoint serves these; only sizes and weights differ.
"""

import warnings
from pathlib import Path

from cli.tiny.sizes import SIZES


def make_checkpoint(out: Path, seed: int, size: str) -> Path:
    """Writes a checkpoint into the directory `out` and returns it.

    Args:
        out: made if needed; files of the same names are replaced.
        seed: of the weights. Tokenizer and config depend on the size only.
        size: a key of `SIZES`.

    Raises:
        KeyError: no such size.
    """
    sizes = SIZES[size]
    import torch
    from transformers import Qwen3OmniMoeForConditionalGeneration
    from transformers.utils import logging

    from cli.tiny.config import generation_config, model_config
    from cli.tiny.processor import save_processor
    from cli.tiny.tokenizer import make_tokenizer
    from cli.tiny.weights import randomize

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(sizes.merges)
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = Qwen3OmniMoeForConditionalGeneration(model_config(sizes, tokenizer)).float().eval()
        randomize(model, tokenizer)
        model.generation_config = generation_config(tokenizer)
        model.save_pretrained(out)
    save_processor(out, tokenizer, sizes)
    return out


__all__ = ["SIZES", "make_checkpoint"]
