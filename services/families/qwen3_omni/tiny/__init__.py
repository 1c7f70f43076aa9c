"""Random checkpoints with published config keys, weight names, tokenizer, template and processors."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from services.families.tiny_sizes import TransformerShape


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
    upsample_rates: tuple[int, ...]  # samples a codec frame, with two factors 2 before them
    speakers: tuple[str, ...]


# "tiny" and "small" share no dimension, so that a test with both finds hard-coded ones.
SIZES = {
    "tiny": Qwen3OmniSizes(
        merges=256,
        thinker=TransformerShape(64, 6, 4, 2, 32, 32, num_experts=8, num_experts_per_tok=2),
        accept_hidden_layer=5,
        encoder_width=64,
        vision_grid=16,
        talker=TransformerShape(64, 4, 4, 2, 32, 32, num_experts=8, num_experts_per_tok=2),
        predictor=TransformerShape(64, 2, 2, 1, 32, 128),
        code_groups=16,
        codebook=256,
        code2wav=TransformerShape(64, 2, 4, 4, 16, 128),
        code2wav_window=72,
        decoder_dim=96,
        upsample_rates=(8, 5, 4, 3),
        speakers=("chelsie", "ethan", "aiden"),
    ),
    "small": Qwen3OmniSizes(
        merges=384,
        thinker=TransformerShape(128, 8, 8, 2, 32, 64, num_experts=12, num_experts_per_tok=3),
        accept_hidden_layer=6,
        encoder_width=96,
        vision_grid=20,
        talker=TransformerShape(96, 5, 6, 3, 16, 48, num_experts=10, num_experts_per_tok=4),
        predictor=TransformerShape(96, 3, 4, 2, 24, 80),
        code_groups=8,
        codebook=160,
        code2wav=TransformerShape(48, 3, 2, 2, 24, 96),
        code2wav_window=20,
        decoder_dim=64,
        upsample_rates=(5, 4, 4, 3),
        speakers=("ada", "bert"),
    ),
}
# Hidden states as wide as the published thinker's, for measuring their transport.
SIZES["wide"] = replace(SIZES["tiny"], thinker=replace(SIZES["tiny"].thinker, hidden_size=2048))


def write_checkpoint(out: Path, size: str, thinks: bool = False) -> None:
    """Writes a checkpoint into `out`, with weights from torch's global generator.

    Args:
        thinks: the model reasons, and has neither talker nor code2wav.

    Raises:
        KeyError: no such size.
    """
    sizes = SIZES[size]
    from services.families.qwen3_omni.tiny.model import write_model
    from services.families.qwen3_omni.tiny.processor import make_tokenizer, save_processor

    tokenizer = make_tokenizer(sizes.merges)
    write_model(out, sizes, tokenizer, thinks)
    save_processor(out, tokenizer, thinks)


ARCHS = {"qwen3-omni": write_checkpoint, "qwen3-omni-thinking": partial(write_checkpoint, thinks=True)}
