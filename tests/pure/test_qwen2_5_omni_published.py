"""Qwen2.5-Omni as published, 7B and 3B: their config.json is understood, and what they need of a GPU is counted."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

from cli.budget import GIB, Demand, Gpus, share_out
from services.common.stream.rows import hidden_states
from services.families.qwen2_5_omni.budget import PREFIXES, sizes
from services.families.qwen2_5_omni.code2wav import new_decoder
from services.families.qwen2_5_omni.talker import read_talker
from services.families.qwen2_5_omni.thinker import ARCHITECTURES, checkpoint
from services.registry import family_of
from services.thinker.plugin.rows import row_bytes
from tests.support.weights.published_sizes import PARAMETERS, PUBLISHED, TALKER, TEXT, TOKEN2WAV_LAYERS

# As transformers 4.52 wrote them: rope by the keys of that time.
ROPE = {
    "rope_theta": 1_000_000.0,
    "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
}
CODEC = {"start": 8293, "end": 8294, "pad": 8292, "mask": 8296}


def published(size: str) -> dict[str, Any]:
    """The parts of config.json that anything here depends on."""
    text = TEXT[size] | ROPE | {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
    width = text["hidden_size"]
    talker = TALKER | {"embedding_size": width}
    talker |= {"max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "hidden_act": "silu", **ROPE}
    talker |= {f"tts_codec_{name}_token_id": code for name, code in CODEC.items()}
    talker |= {"tts_text_start_token_id": 151_860, "tts_text_end_token_id": 151_861, "tts_text_pad_token_id": 151_859}
    media = {"audio_token_index": 151_646, "image_token_index": 151_655, "video_token_index": 151_656}
    return {
        "architectures": ["Qwen2_5OmniModel"],
        "model_type": "qwen2_5_omni",
        "torch_dtype": "bfloat16",
        "enable_audio_output": True,
        "thinker_config": {
            "text_config": text,
            "audio_config": {"output_dim": width},
            "vision_config": {"hidden_size": 1280, "out_hidden_size": width},
            **media,
        },
        "talker_config": talker | media,
        "token2wav_config": {
            "dit_config": {"num_embeds": 8193, "mel_dim": 80, "block_size": 24, "repeats": 2},
            "bigvgan_config": {"mel_dim": 80, "upsample_initial_channel": 1536},
        },
    }


@pytest.fixture(params=TEXT)
def size(request: pytest.FixtureRequest) -> str:
    return request.param


def test_the_thinkers_last_states_are_what_is_kept(size: str, tmp_path: Path) -> None:
    config = published(size)
    found = checkpoint(tmp_path, config, None)
    kinds = found.row_kinds()
    assert kinds[0].name == hidden_states(TEXT[size]["num_hidden_layers"])
    assert row_bytes(kinds, torch.bfloat16) == sizes(config, []).states_per_token
    assert found.dtype == "bfloat16"
    assert set(config["architectures"]) < set(ARCHITECTURES)


def test_the_talker(size: str, tmp_path: Path) -> None:
    voice = {"cond": torch.ones(1, 192), "ref_mel": torch.ones(1, 9, 80)}
    torch.save(
        {"Chelsie": voice | {"bos_token": 151_872}, "Ethan": voice | {"bos_token": 151_870}}, tmp_path / "spk_dict.pt"
    )
    spec = read_talker(published(size), tmp_path).spec
    assert spec.speakers == ("Chelsie", "Ethan")
    assert spec.talker.rope_sections == (16, 24, 24)
    assert spec.talker.rope_theta == 1_000_000.0
    assert spec.end_codes == {8292, 8294}
    assert spec.suppressed_codes == set(range(8194, 8448)) - {8292, 8294}
    assert spec.seen_codes == {8292, 8293, 8296}
    assert spec.after_text == (151_861, 151_859)
    assert spec.state_width == TEXT[size]["hidden_size"]


def test_the_decoder(size: str) -> None:
    with torch.device("meta"):
        spec = new_decoder(published(size)).spec
    assert (spec.sample_rate_hz, spec.samples_per_frame, spec.codebook_sizes) == (24_000, 480, (8194,))


def test_what_it_needs_of_a_gpu(size: str) -> None:
    config = published(size)
    with torch.device("meta"):
        model: Any = Qwen2_5OmniForConditionalGeneration(Qwen2_5OmniConfig(**json.loads(json.dumps(config))))
    tensors = [(name, 2 * tensor.numel()) for name, tensor in model.state_dict().items()]
    counted = sizes(config, tensors)
    stored = {stage: 2 * count for stage, count in PARAMETERS[size].items()}
    assert {stage: counted.weights[stage] for stage in ("thinker", "talker")} == {
        stage: stored[stage] for stage in ("thinker", "talker")
    }
    beside = counted.weights["code2wav"] - 2 * stored["code2wav"] + 2 * TOKEN2WAV_LAYERS
    assert 0.1 * GIB < beside < 0.5 * GIB, "all but the transformer's layers is float32"
    assert counted == replace(PUBLISHED[size], unsplit=counted.unsplit)
    assert set(PREFIXES) == set(counted.weights)
    assert counted.kv_per_token == {"7B": 56, "3B": 36}[size] * 1024
    assert counted.talker_kv_per_position == 48 * 1024
    budget = share_out(counted, Gpus.alike(48 * GIB), Demand())
    assert budget.free_bytes(0) > 0
    assert family_of(config).pipeline_of(config) == "qwen2.5-omni.yaml"
