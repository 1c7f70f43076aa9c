"""The talker of Qwen3-TTS: a dense decoder that speaks a text, with its own, designed or cloned voices."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from services.families.qwen3_tts.talker_prompt import PromptSpec, SpokenText
from services.families.talker_config import generation_values, transformer_spec
from services.talker import family
from services.talker.inputs import SampleReader
from services.talker.text import TextTokenizer

# The last ids of the codec vocabulary are control ids. The reference samples none of them but its end of speech.
# Source: `Qwen3TTSForConditionalGeneration.generate` of qwen-tts, as for `min_new_tokens`.
CONTROL_IDS = 1024
MIN_FRAMES = 2
CODEC = "qwen3_tts_tokenizer_12hz"

WEIGHTS = family.WeightNames(
    prefixes={
        "talker.code_predictor.small_to_mtp_projection.": "code_predictor.input_projection.",
        "talker.model.text_embedding.weight": family.TEXT_EMBEDDINGS,
        "talker.": "",
    },
    stored_dtype_of="talker.codec_head.weight",
)


def read_talker(config: dict[str, Any], folder: Path) -> family.TalkerFamily:
    """See `services.talker.family.TalkerModule`. Also reads generation_config.json, if any."""
    if config.get("tokenizer_type", CODEC) != CODEC:
        raise ValueError(f"tokenizer_type {config['tokenizer_type']!r} is not supported, only {CODEC}")
    spec, prompt = _talker_spec(config, _sampling_defaults(folder)), PromptSpec(config)
    kind, size = config.get("tts_model_type"), config.get("tts_model_size")
    return family.TalkerFamily(
        spec,
        WEIGHTS,
        text_input=partial(SpokenText, prompt, TextTokenizer(folder)),
        languages=prompt.languages,
        takes_instructions=kind == "voice_design" or (kind == "custom_voice" and size != "0b6"),
        sample_reader=partial(_sample_reader, config, folder) if kind == "base" else None,
    )


def _sample_reader(config: dict[str, Any], folder: Path, *where: Any) -> SampleReader:
    from services.families.qwen3_tts.voice_sample import load_sample_reader

    return load_sample_reader(config, folder, *where)


def _talker_spec(config: Mapping[str, Any], defaults: family.SamplingDefaults) -> family.TalkerSpec:
    talker = config["talker_config"]
    end, vocab, width = talker["codec_eos_token_id"], talker["vocab_size"], talker["text_hidden_size"]
    return family.TalkerSpec(
        talker=transformer_spec(talker, "talker_config"),
        num_code_groups=talker["num_code_groups"],
        max_positions=talker["max_position_embeddings"],
        text_vocab=talker["text_vocab_size"],
        speakers=tuple(sorted(talker.get("spk_id") or ())),
        after_text=(config["tts_eos_token_id"], config["tts_pad_token_id"]),
        end_codes=frozenset({end}),
        suppressed_codes=frozenset(range(max(0, vocab - CONTROL_IDS), vocab)) - {end},
        min_frames=MIN_FRAMES,
        predictor=transformer_spec(talker["code_predictor_config"], "talker_config.code_predictor_config"),
        text_projection=family.ProjectionSpec(width, width),
        defaults=defaults,
    )


def _sampling_defaults(folder: Path) -> family.SamplingDefaults:
    """The checkpoint's generation values, else the defaults of qwen-tts' `_merge_generate_kwargs`."""
    values = generation_values(folder)
    talker_draws, predictor_draws = values.get("do_sample", True), values.get("subtalker_dosample", True)
    return family.SamplingDefaults(
        temperature=values.get("temperature", 0.9) if talker_draws else 0.0,
        top_k=values.get("top_k", 50),
        top_p=values.get("top_p", 1.0),
        repetition_penalty=values.get("repetition_penalty", 1.05),
        max_frames=values.get("max_new_tokens", 2048),
        predictor_temperature=values.get("subtalker_temperature", 0.9) if predictor_draws else 0.0,
        predictor_top_k=values.get("subtalker_top_k", 50),
        predictor_top_p=values.get("subtalker_top_p", 1.0),
    )
