"""Random checkpoints with the real architecture: config keys, weight names, tokenizer, template, processors.

The loading code that serves the published checkpoint serves these; only sizes and weights differ.
"""

from pathlib import Path

from services.families.qwen3_omni.tiny.sizes import SIZES


def write_checkpoint(out: Path, size: str) -> None:
    """Writes a checkpoint into the directory `out`; weights are drawn from torch's global generator.

    Args:
        out: files of the same names are replaced.
        size: a key of `SIZES`. Tokenizer and config depend on it only.

    Raises:
        KeyError: no such size.
    """
    sizes = SIZES[size]
    from transformers import Qwen3OmniMoeForConditionalGeneration

    from services.families.qwen3_omni.tiny.config import generation_config, model_config
    from services.families.qwen3_omni.tiny.processor import make_tokenizer, save_processor
    from services.families.qwen3_omni.tiny.weights import randomize

    tokenizer = make_tokenizer(sizes.merges)
    model = Qwen3OmniMoeForConditionalGeneration(model_config(sizes, tokenizer)).float().eval()
    randomize(model, tokenizer)
    model.generation_config = generation_config(tokenizer)
    model.save_pretrained(out)
    save_processor(out, tokenizer)
