"""Random checkpoints with published config keys, weight names, tokenizer, template and processors."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from services.families.tiny_sizes import TransformerShape, read_sizes


@dataclass(frozen=True)
class Qwen3OmniSizes:
    """A checkpoint's dimensions."""

    merges: int  # of the byte-level BPE, besides 256 bytes and the special tokens
    thinker: TransformerShape
    accept_hidden_layer: int  # above the number of deepstack levels, as in the published model
    encoder_width: int  # of the audio and vision encoders
    vision_grid: int  # position embeddings a side
    talker: TransformerShape
    predictor: TransformerShape  # as wide as the talker, whose state is its first input
    code_groups: int
    codebook: int
    code2wav: TransformerShape
    code2wav_window: int  # frames
    decoder_dim: int
    upsample_rates: Sequence[int]  # samples a codec frame, with two factors 2 before them
    speakers: Sequence[str]


def write_checkpoint(out: Path, size: str, thinks: bool = False) -> None:
    """Writes a checkpoint into `out`, with weights from torch's global generator.

    Args:
        thinks: the model reasons, and has neither talker nor code2wav.

    Raises:
        KeyError: no such size.
    """
    sizes = read_sizes(__file__, Qwen3OmniSizes)[size]
    from services.families.qwen3_omni.tiny.model import write_model
    from services.families.qwen3_omni.tiny.processor import make_tokenizer, save_processor

    tokenizer = make_tokenizer(sizes.merges)
    write_model(out, sizes, tokenizer, thinks)
    save_processor(out, tokenizer, thinks)


ARCHS = {"qwen3-omni": write_checkpoint, "qwen3-omni-thinking": partial(write_checkpoint, thinks=True)}
