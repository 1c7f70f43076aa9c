"""Random checkpoints with published config keys, weight names, tokenizer, template, processors and voices."""

from dataclasses import dataclass
from pathlib import Path

from services.families.tiny_sizes import TransformerShape


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


# "tiny" and "small" share no dimension, so that a test with both finds hard-coded ones.
SIZES = {
    "tiny": Qwen25OmniSizes(
        merges=256,
        thinker=TransformerShape(128, 6, 4, 2, 0, 256),
        encoder_width=64,
        talker=TransformerShape(48, 3, 4, 2, 32, 96),
        codebook=160,
    ),
    "small": Qwen25OmniSizes(
        merges=384,
        thinker=TransformerShape(192, 4, 3, 1, 0, 160),
        encoder_width=96,
        talker=TransformerShape(80, 4, 6, 3, 16, 112),
        codebook=224,
    ),
}


def write_checkpoint(out: Path, size: str) -> None:
    """Writes a checkpoint into `out`, with weights from torch's global generator.

    Raises:
        KeyError: no such size.
    """
    sizes = SIZES[size]
    from services.families.qwen2_5_omni.tiny.model import write_model
    from services.families.qwen2_5_omni.tiny.processor import SPECIAL_TOKENS, save_processor
    from services.families.qwen3_omni.tiny.processor import make_tokenizer

    tokenizer = make_tokenizer(sizes.merges, special_tokens=SPECIAL_TOKENS)
    write_model(out, sizes, tokenizer)
    save_processor(out, tokenizer)


ARCHS = {"qwen2.5-omni": write_checkpoint}
