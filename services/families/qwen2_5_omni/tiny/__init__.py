"""Random checkpoints with published config keys, weight names, tokenizer, template, processors and voices."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Transformer:
    """A dense decoder with grouped-query attention. Fields are keys of its config."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int


@dataclass(frozen=True)
class Sizes:
    """A checkpoint's dimensions.

    Attributes:
        merges: of the byte-level BPE. Its vocabulary is 256 bytes, the merges, special tokens and speech ids.
        encoder_width: of the audio and vision encoders.
        head_dim: of the talker.
        codebook: number of codes.
    """

    merges: int
    thinker: Transformer
    encoder_width: int
    talker: Transformer
    head_dim: int
    codebook: int


# "tiny" and "small" share no dimension, so that a test with both finds hard-coded ones.
SIZES = {
    "tiny": Sizes(
        merges=256,
        thinker=Transformer(128, 6, 4, 2, 256),
        encoder_width=64,
        talker=Transformer(48, 3, 4, 2, 96),
        head_dim=32,
        codebook=160,
    ),
    "small": Sizes(
        merges=384,
        thinker=Transformer(192, 4, 3, 1, 160),
        encoder_width=96,
        talker=Transformer(80, 4, 6, 3, 112),
        head_dim=16,
        codebook=224,
    ),
}


def write_checkpoint(out: Path, size: str) -> None:
    """Writes a checkpoint into `out`, with weights from torch's global generator. Tokenizer and config depend on `size`
    only.

    Raises:
        KeyError: no such size.
    """
    sizes = SIZES[size]
    from services.families.qwen2_5_omni.tiny.model import write_model
    from services.families.qwen2_5_omni.tiny.processor import new_tokenizer, save_processor

    tokenizer = new_tokenizer(sizes.merges)
    write_model(out, sizes, tokenizer)
    save_processor(out, tokenizer)


ARCHS = {"qwen2.5-omni": write_checkpoint}
