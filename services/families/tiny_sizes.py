"""Sizes of small random checkpoints, without torch."""

from dataclasses import asdict, dataclass

# Talker vocabulary: the codebook, then CODEC_SPECIAL_IDS ids. These are offsets of those used, as published.
CODEC_SPECIAL_IDS = 1024
CODEC_IDS = {
    "codec_pad_id": 100,
    "codec_bos_id": 101,
    "codec_eos_token_id": 102,
    "codec_nothink_id": 107,
    "codec_think_bos_id": 108,
    "codec_think_eos_id": 109,
}
CODEC_VOICE = 253  # of the first voice
# Config keys of special ids, with their tokens.
SPEECH_TOKENS = {
    "im_start_token_id": "<|im_start|>",
    "im_end_token_id": "<|im_end|>",
    "assistant_token_id": "assistant",
    "tts_pad_token_id": "<tts_pad>",
    "tts_bos_token_id": "<tts_text_bos>",
    "tts_eos_token_id": "<tts_text_eod>",
}


@dataclass(frozen=True)
class TransformerShape:
    """A decoder with grouped-query attention. Fields are keys of its config, which leaves out zeros."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    num_experts: int = 0
    num_experts_per_tok: int = 0

    def config(self) -> dict[str, int]:
        return {key: size for key, size in asdict(self).items() if size}
