"""The talker of Qwen2.5-Omni: a dense decoder of one codebook that reads all states of the thinker."""

from functools import partial
from pathlib import Path
from typing import Any

from services.families.qwen2_5_omni.talker_prompt import AnswerInput, PromptSpec
from services.families.qwen2_5_omni.token2wav.sizes import DitSizes
from services.families.qwen2_5_omni.voices import FILE, read_voices
from services.families.talker_config import rope_of, transformer_spec
from services.talker import family

WEIGHTS = family.WeightNames(
    prefixes={
        "talker.thinker_to_talker_proj.": "text_projection.",
        "talker.model.embed_tokens.": "model.codec_embedding.",
        "talker.": "",
        "thinker.model.embed_tokens.weight": family.TEXT_EMBEDDINGS,
    },
    stored_dtype_of="talker.codec_head.weight",
)
# Source: transformers' `Qwen2_5OmniForConditionalGeneration.generate`.
SAMPLING = family.SamplingDefaults(temperature=0.9, top_k=40, top_p=0.8, repetition_penalty=1.05, max_frames=4096)


def read_talker(config: dict[str, Any], folder: Path) -> family.TalkerFamily:
    """See `services.talker.family.TalkerModule`. Also reads spk_dict.pt."""
    voice_ids = {name: voice.bos_token_id for name, voice in read_voices(folder).items()}
    spec, prompt = _talker_spec(config, tuple(voice_ids)), PromptSpec(config, voice_ids)
    for name, token_id in voice_ids.items():
        if token_id >= spec.text_vocab:
            raise ValueError(f"{FILE}: {name}.bos_token {token_id} must be below {spec.text_vocab}, the ids of text")
    return family.TalkerFamily(spec, WEIGHTS, thinker_input=partial(AnswerInput, prompt, spec.text_vocab))


def _talker_spec(config: dict[str, Any], voices: tuple[str, ...]) -> family.TalkerSpec:
    talker = config["talker_config"]
    codec = {name: talker[f"tts_codec_{name}_token_id"] for name in ("start", "end", "pad", "mask")}
    ends = frozenset({codec["pad"], codec["end"]})
    # code2wav has no embeddings of the other codes. The reference suppresses only the start, and fails at the rest.
    known = config["token2wav_config"].get("dit_config", {}).get("num_embeds", DitSizes.num_embeds) + 1
    return family.TalkerSpec(
        talker=transformer_spec(
            talker,
            "talker_config",
            qkv_bias=True,
            qk_norm=False,
            rope_sections=tuple(rope_of(talker)["mrope_section"]),
        ),
        num_code_groups=1,
        max_positions=talker["max_position_embeddings"],
        text_vocab=config["thinker_config"]["text_config"]["vocab_size"],
        speakers=voices,
        after_text=(talker["tts_text_end_token_id"], talker["tts_text_pad_token_id"]),
        end_codes=ends,
        suppressed_codes=frozenset(range(known, talker["vocab_size"])) - ends,
        # The reference applies its penalty to the codes of the prompt.
        seen_codes=frozenset({codec["mask"], codec["pad"], codec["start"]}),
        text_projection=family.ProjectionSpec(talker["embedding_size"]),
        shares_projection=True,
        text_has_states=True,
        defaults=SAMPLING,
    )
