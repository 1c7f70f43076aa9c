"""Random checkpoints with published config keys, weight names, tokenizer, template, processors and voices."""

from dataclasses import dataclass
from pathlib import Path

from services.families.tiny_sizes import TransformerShape, read_sizes


@dataclass(frozen=True)
class Qwen25OmniSizes:
    """A checkpoint's dimensions.

    Attributes:
        merges: of the byte-level BPE, besides 256 bytes and special tokens.
        encoder_width: of the audio and vision encoders.
    """

    merges: int
    thinker: TransformerShape
    encoder_width: int
    talker: TransformerShape
    codebook: int


def write_checkpoint(out: Path, size: str) -> None:
    """Writes a checkpoint into `out`, with weights from torch's global generator.

    Raises:
        KeyError: no such size.
    """
    sizes = read_sizes(__file__, Qwen25OmniSizes)[size]
    from services.families.qwen2_5_omni.tiny.model import write_model
    from services.families.qwen2_5_omni.tiny.processor import SPECIAL_TOKENS, save_processor
    from services.families.qwen3_omni.tiny.processor import make_tokenizer

    tokenizer = make_tokenizer(sizes.merges, special_tokens=SPECIAL_TOKENS)
    write_model(out, sizes, tokenizer)
    save_processor(out, tokenizer)


ARCHS = {"qwen2.5-omni": write_checkpoint}
