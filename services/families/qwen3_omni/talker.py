"""The talker of Qwen3-Omni: a mixture of experts that reads a thinker's prompt and speaks its answer."""

from functools import partial
from pathlib import Path
from typing import Any

from transformers import Qwen3OmniMoeConfig

from services.families.qwen3_omni.talker_prompt import AnswerInput, PromptSpec
from services.families.qwen3_omni.talker_text import TextTurn
from services.families.talker_config import generation_values, rope_of, transformer_spec
from services.talker import family
from services.talker.text import TextTokenizer

# The last ids of the codec vocabulary are control ids. The reference samples none of them but its end of speech.
# Source: transformers' Qwen3OmniMoeForConditionalGeneration.generate.
CONTROL_IDS = 1024
# The reference's default, if the checkpoint has it.
DEFAULT_VOICE = "ethan"

WEIGHTS = family.WeightNames(
    prefixes={
        "talker.hidden_projection.": "state_projection.",
        "talker.": "",
        "thinker.model.embed_tokens.weight": family.TEXT_EMBEDDINGS,
    },
    stored_dtype_of="talker.codec_head.weight",
)


def read_talker(config: dict[str, Any], folder: Path) -> family.TalkerFamily:
    """See `services.talker.family.TalkerModule`. Also reads generation_config.json if there is one."""
    whole: Any = Qwen3OmniMoeConfig(**config)
    if not whole.talker_config.speaker_id:
        raise ValueError("talker_config.speaker_id names no voice")
    spec, prompt = _talker_spec(whole, _sampling_defaults(folder)), PromptSpec(whole)
    return family.TalkerFamily(
        spec,
        WEIGHTS,
        thinker_input=partial(AnswerInput, prompt, spec.text_vocab),
        text_input=partial(TextTurn, prompt, TextTokenizer(folder)),
        takes_instructions=True,
    )


def _talker_spec(config: Any, defaults: family.SamplingDefaults) -> family.TalkerSpec:
    talker = config.talker_config
    text, predictor, end = talker.text_config, talker.code_predictor_config, talker.codec_eos_token_id
    layers: dict[str, Any] = text.to_dict()
    resize = family.ProjectionSpec(talker.thinker_hidden_size, text.intermediate_size)
    return family.TalkerSpec(
        talker=transformer_spec(
            layers,
            text.model_type,
            rope_sections=tuple(rope_of(layers).get("mrope_section", (24, 20, 20))),
            rope_interleaved=True,
        ),
        num_code_groups=talker.num_code_groups,
        max_positions=text.max_position_embeddings,
        text_vocab=config.thinker_config.text_config.vocab_size,
        speakers=tuple(sorted(talker.speaker_id, key=lambda voice: (voice.lower() != DEFAULT_VOICE, voice))),
        after_text=(config.tts_eos_token_id, config.tts_pad_token_id),
        end_codes=frozenset({end}),
        suppressed_codes=frozenset(range(max(0, text.vocab_size - CONTROL_IDS), text.vocab_size)) - {end},
        moe=family.MoeSpec(
            experts=text.num_experts,
            experts_per_token=text.num_experts_per_tok,
            intermediate=text.moe_intermediate_size,
            shared_intermediate=text.shared_expert_intermediate_size,
            renormalize=text.norm_topk_prob,
        ),
        predictor=transformer_spec(predictor.to_dict(), predictor.model_type),
        text_projection=resize,
        state_projection=resize,
        defaults=defaults,
    )


def _sampling_defaults(folder: Path) -> family.SamplingDefaults:
    """The checkpoint's `talker_*` generation values, else the defaults of the reference's `generate`.

    Source of the predictor's: `Qwen3OmniMoeTalkerForConditionalGeneration.prepare_inputs_for_generation`.
    """
    values = generation_values(folder)
    stated: dict[str, Any] = {"temperature": 0.9, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.05}
    return family.SamplingDefaults(
        **{name: values.get(f"talker_{name}", default) for name, default in stated.items()},
        max_frames=values.get("talker_max_new_tokens", 4096),
        predictor_temperature=1.0,
        predictor_top_k=50,
        predictor_top_p=0.8,
    )
