"""Dimensions of the random checkpoints. "tiny" and "small" share none: a test with both finds what is hard-coded."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Transformer:
    """A decoder with grouped-query attention; experts == 0 means a dense MLP of `intermediate` features."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    experts: int = 0
    experts_per_token: int = 0


@dataclass(frozen=True)
class Sizes:
    """One checkpoint's dimensions."""

    merges: int  # of the byte-level BPE: the vocabulary is 256 bytes, these, and the special tokens
    thinker: Transformer
    accept_hidden_layer: int  # above the number of deepstack levels, as in the published model
    encoder_width: int  # of the audio and vision encoders
    vision_grid: int  # position embeddings a side
    talker: Transformer
    predictor: Transformer  # as wide as the talker, whose state is its first input
    code_groups: int
    codebook: int
    code2wav: Transformer
    code2wav_window: int  # frames
    decoder_dim: int
    upsample_rates: tuple[int, ...]  # with the two factors 2 before them: samples a codec frame
    speakers: tuple[str, ...]


SIZES = {
    "tiny": Sizes(
        merges=256,
        thinker=Transformer(64, 6, 4, 2, 32, 32, experts=8, experts_per_token=2),
        accept_hidden_layer=5,
        encoder_width=64,
        vision_grid=16,
        talker=Transformer(64, 4, 4, 2, 32, 32, experts=8, experts_per_token=2),
        predictor=Transformer(64, 2, 2, 1, 32, 128),
        code_groups=16,
        codebook=256,
        code2wav=Transformer(64, 2, 4, 4, 16, 128),
        code2wav_window=72,
        decoder_dim=96,
        upsample_rates=(8, 5, 4, 3),
        speakers=("chelsie", "ethan", "aiden"),
    ),
    "small": Sizes(
        merges=384,
        thinker=Transformer(128, 8, 8, 2, 32, 64, experts=12, experts_per_token=3),
        accept_hidden_layer=6,
        encoder_width=96,
        vision_grid=20,
        talker=Transformer(96, 5, 6, 3, 16, 48, experts=10, experts_per_token=4),
        predictor=Transformer(96, 3, 4, 2, 24, 80),
        code_groups=8,
        codebook=160,
        code2wav=Transformer(48, 3, 2, 2, 24, 96),
        code2wav_window=20,
        decoder_dim=64,
        upsample_rates=(5, 4, 4, 3),
        speakers=("ada", "bert"),
    ),
}
# Hidden states as wide as the published thinker's, for measuring what it takes to move them.
SIZES["wide"] = replace(SIZES["tiny"], thinker=replace(SIZES["tiny"].thinker, hidden=2048))
