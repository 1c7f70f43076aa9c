"""What the talker needs to know of a checkpoint: sizes, special ids, voices, sampling defaults. All read from it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

# The reference never samples the last 1,024 ids of the codec vocabulary (but its end-of-speech): they are control ids.
# Source: transformers' Qwen3OmniMoeForConditionalGeneration.generate.
CONTROL_IDS = 1024
# Its default, used where a request names no voice and the checkpoint has this one.
DEFAULT_VOICE = "ethan"


@dataclass(frozen=True)
class TransformerSpec:
    """Sizes of a decoder stack: the talker's or the code predictor's."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    norm_eps: float
    rope_theta: float
    attention_bias: bool
    activation: str


@dataclass(frozen=True)
class MoeSpec:
    """Mixture of experts of a talker layer."""

    experts: int
    experts_per_token: int
    intermediate: int
    shared_intermediate: int
    renormalize: bool


@dataclass(frozen=True)
class SamplingDefaults:
    """What applies where a request sets nothing. `max_frames` is in codec frames."""

    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    max_frames: int
    predictor_temperature: float
    predictor_top_k: int
    predictor_top_p: float


@dataclass(frozen=True)
class TalkerSpec:
    """The talker of one checkpoint. Ids named `codec_*` index the codec vocabulary, the others the text vocabulary."""

    talker: TransformerSpec
    moe: MoeSpec
    predictor: TransformerSpec
    mrope_section: tuple[int, ...]
    num_code_groups: int
    thinker_hidden: int
    accept_hidden_layer: int
    max_positions: int
    speakers: dict[str, int]
    im_start_id: int
    user_id: int
    assistant_id: int
    media_ids: frozenset[int]
    vision_ids: frozenset[int]
    vision_start_id: int
    audio_start_id: int
    tts_bos_id: int
    tts_eos_id: int
    tts_pad_id: int
    codec_nothink_id: int
    codec_think_bos_id: int
    codec_think_eos_id: int
    codec_pad_id: int
    codec_bos_id: int
    codec_eos_id: int
    defaults: SamplingDefaults

    @property
    def suppressed_codes(self) -> list[int]:
        """Codec ids that are never sampled in group 0."""
        vocab = self.talker.vocab
        return [code for code in range(max(0, vocab - CONTROL_IDS), vocab) if code != self.codec_eos_id]


def read_spec(folder: Path) -> TalkerSpec:
    """Reads `config.json` and, where there is one, `generation_config.json` of the checkpoint in `folder`.

    Raises:
        ValueError: the checkpoint has no talker, or one of a kind this engine does not run.
    """
    config = AutoConfig.from_pretrained(folder)
    if getattr(config, "talker_config", None) is None or not getattr(config, "enable_audio_output", True):
        raise ValueError(f"the checkpoint in {folder} has no talker (model type {config.model_type})")
    talker, thinker = config.talker_config, config.thinker_config
    text, predictor = talker.text_config, talker.code_predictor_config
    if predictor.hidden_size != text.hidden_size:
        raise ValueError(f"code predictor of hidden size {predictor.hidden_size} behind a talker of {text.hidden_size}")
    if not talker.speaker_id:
        raise ValueError("talker_config.speaker_id names no voice")
    return TalkerSpec(
        talker=_transformer(text),
        moe=MoeSpec(
            experts=text.num_experts,
            experts_per_token=text.num_experts_per_tok,
            intermediate=text.moe_intermediate_size,
            shared_intermediate=text.shared_expert_intermediate_size,
            renormalize=text.norm_topk_prob,
        ),
        predictor=_transformer(predictor),
        mrope_section=tuple(text.rope_parameters.get("mrope_section", (24, 20, 20))),
        num_code_groups=talker.num_code_groups,
        thinker_hidden=talker.thinker_hidden_size,
        accept_hidden_layer=talker.accept_hidden_layer,
        max_positions=text.max_position_embeddings,
        speakers=dict(sorted(talker.speaker_id.items(), key=lambda voice: (voice[0].lower() != DEFAULT_VOICE, voice))),
        im_start_id=config.im_start_token_id,
        user_id=config.user_token_id,
        assistant_id=config.assistant_token_id,
        media_ids=frozenset({thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id}),
        vision_ids=frozenset({thinker.image_token_id, thinker.video_token_id}),
        vision_start_id=talker.vision_start_token_id,
        audio_start_id=talker.audio_start_token_id,
        tts_bos_id=config.tts_bos_token_id,
        tts_eos_id=config.tts_eos_token_id,
        tts_pad_id=config.tts_pad_token_id,
        codec_nothink_id=talker.codec_nothink_id,
        codec_think_bos_id=talker.codec_think_bos_id,
        codec_think_eos_id=talker.codec_think_eos_id,
        codec_pad_id=talker.codec_pad_id,
        codec_bos_id=talker.codec_bos_id,
        codec_eos_id=talker.codec_eos_token_id,
        defaults=_sampling_defaults(folder),
    )


def _transformer(config: Any) -> TransformerSpec:
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"{config.model_type}: rope_type {rope['rope_type']} is not supported, only default")
    if getattr(config, "sliding_window", None) is not None and "sliding_attention" in getattr(
        config, "layer_types", ()
    ):
        raise ValueError(f"{config.model_type}: sliding-window layers are not supported")
    return TransformerSpec(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        rope_theta=rope["rope_theta"],
        attention_bias=config.attention_bias,
        activation=config.hidden_act,
    )


def _sampling_defaults(folder: Path) -> SamplingDefaults:
    """The checkpoint's `talker_*` generation values; where absent, the defaults of the reference's `generate`.

    The predictor's values are those that `Qwen3OmniMoeTalkerForConditionalGeneration.prepare_inputs_for_generation`
    passes to it.
    """
    path = folder / "generation_config.json"
    values = json.loads(path.read_text()) if path.is_file() else {}
    return SamplingDefaults(
        temperature=values.get("talker_temperature", 0.9),
        top_k=values.get("talker_top_k", 50),
        top_p=values.get("talker_top_p", 1.0),
        repetition_penalty=values.get("talker_repetition_penalty", 1.05),
        max_frames=values.get("talker_max_new_tokens", 4096),
        predictor_temperature=1.0,
        predictor_top_k=50,
        predictor_top_p=0.8,
    )
