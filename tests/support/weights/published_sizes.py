"""What the published models need of a GPU, in bfloat16."""

from services.families.qwen2_5_omni.budget import PREFIXES
from services.families.qwen2_5_omni.budget import sizes as omni_2_5
from services.families.qwen3_omni.budget import PUBLISHED as OMNI_3
from services.families.qwen3_tts.budget import sizes as tts
from services.sizes import Sizes

# Of Qwen2.5-Omni's architecture, counted once: parameters, and what sizes depend on.
PARAMETERS = {
    "7B": {"thinker": 8_931_813_888, "talker": 1_351_360_256, "code2wav": 449_051_264},
    "3B": {"thinker": 4_703_464_448, "talker": 1_337_007_872, "code2wav": 449_051_264},
}
TOKEN2WAV_LAYERS = 184_707_072  # of code2wav's, without modulations: computed in bfloat16
TEXT = {
    "7B": {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {"num_key_value_heads": 4, "vocab_size": 152_064},
    "3B": {"hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36, "num_attention_heads": 16}
    | {"num_key_value_heads": 2, "vocab_size": 151_936},
}
TALKER = {"hidden_size": 896, "intermediate_size": 18_944, "num_hidden_layers": 24, "vocab_size": 8448}
TALKER |= {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 128}
TTS = {"TTS 1.7B": (2048, 1_928_677_440), "TTS 0.6B": (1024, 914_643_008)}  # width; parameters, without the codec


def _omni_2_5(size: str) -> Sizes:
    config = {"dtype": "bfloat16", "thinker_config": {"text_config": TEXT[size]}, "talker_config": TALKER}
    counts = {PREFIXES[stage]: count for stage, count in PARAMETERS[size].items()}
    counts[PREFIXES["code2wav"]] -= TOKEN2WAV_LAYERS
    counts[f"{PREFIXES['code2wav']}code2wav_dit_model.transformer_blocks.0.attn.to_q.weight"] = TOKEN2WAV_LAYERS
    return omni_2_5(config, [(name, 2 * count) for name, count in counts.items()])


def _tts(width: int, parameters: int) -> Sizes:
    talker = {"text_vocab_size": 151_936, "hidden_size": width, "num_hidden_layers": 28, "num_key_value_heads": 8}
    return tts({"dtype": "bfloat16", "talker_config": talker | {"head_dim": 128}}, [("talker.", 2 * parameters)])


PUBLISHED = {
    "30B": OMNI_3,
    **{size: _omni_2_5(size) for size in PARAMETERS},
    **{name: _tts(*sizes) for name, sizes in TTS.items()},
}
