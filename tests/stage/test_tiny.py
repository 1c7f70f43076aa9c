"""`quartet tiny`: the checkpoint is what the published one is, in small, and the same for the same seed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import Qwen3OmniMoeForConditionalGeneration, Qwen3OmniMoeProcessor

from cli.tiny import make_checkpoint
from services.families.qwen3_omni import tiny as qwen3_omni
from services.families.tiny_sizes import read_sizes


@pytest.fixture(params=["tiny_checkpoint", "small_checkpoint"])
def checkpoint(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def config_of(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "config.json").read_text())


def test_transformers_loads_every_weight(checkpoint: Path) -> None:
    loaded: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(checkpoint, output_loading_info=True)
    model, report = loaded
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.float32


def test_experts_are_stored_one_by_one_under_their_published_names(checkpoint: Path) -> None:
    config = config_of(checkpoint)
    with safe_open(checkpoint / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
    parts = {
        "thinker": config["thinker_config"]["text_config"]["num_experts"],
        "talker": config["talker_config"]["text_config"]["num_local_experts"],
    }
    for part, experts in parts.items():
        for expert in range(experts):
            for matrix in ("gate_proj", "up_proj", "down_proj"):
                assert f"{part}.model.layers.0.mlp.experts.{expert}.{matrix}.weight" in names


def test_special_ids_are_the_tokenizers(checkpoint: Path) -> None:
    config = config_of(checkpoint)
    token = Qwen3OmniMoeProcessor.from_pretrained(checkpoint).tokenizer.convert_tokens_to_ids
    expected = {
        "im_start_token_id": "<|im_start|>",
        "im_end_token_id": "<|im_end|>",
        "tts_pad_token_id": "<tts_pad>",
        "tts_bos_token_id": "<tts_text_bos>",
        "tts_eos_token_id": "<tts_text_eod>",
        "system_token_id": "system",
        "user_token_id": "user",
        "assistant_token_id": "assistant",
    }
    assert {key: config[key] for key in expected} == {key: token(text) for key, text in expected.items()}
    thinker = config["thinker_config"]
    assert thinker["audio_token_id"] == token("<|audio_pad|>")
    assert thinker["image_token_id"] == token("<|image_pad|>")
    assert thinker["video_token_id"] == token("<|video_pad|>")


def test_the_talkers_ids_lie_in_the_1024_above_the_codebook(checkpoint: Path) -> None:
    config = config_of(checkpoint)
    talker, codebook = config["talker_config"], config["code2wav_config"]["codebook_size"]
    assert talker["text_config"]["vocab_size"] == codebook + 1024
    ids = [talker[key] for key in talker if key.startswith("codec_")] + list(talker["speaker_id"].values())
    assert len(set(ids)) == len(ids)
    assert all(codebook <= i < codebook + 1024 for i in ids)


def test_the_accepted_layer_is_above_the_deepstack_levels(checkpoint: Path) -> None:
    config = config_of(checkpoint)
    levels = len(config["thinker_config"]["vision_config"]["deepstack_visual_indexes"])
    layers = config["thinker_config"]["text_config"]["num_hidden_layers"]
    assert levels < config["talker_config"]["accept_hidden_layer"] < layers


def test_greedy_text_is_diverse_and_speech_audible(checkpoint: Path) -> None:
    processor: Any = Qwen3OmniMoeProcessor.from_pretrained(checkpoint)
    model: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(checkpoint)
    conversation = [{"role": "user", "content": "Tell me about the sea."}]
    text = processor.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    inputs = processor(text=text, return_tensors="pt")
    ids, speech = model.generate(
        **inputs,
        speaker=next(iter(model.config.talker_config.speaker_id)),
        thinker_eos_token_id=model.config.im_end_token_id,
        thinker_max_new_tokens=24,
        thinker_do_sample=False,
        talker_do_sample=False,
        talker_max_new_tokens=24,
    )
    assert len(set(ids[0, inputs.input_ids.shape[1] :].tolist())) > 6
    assert 0.03 < speech.pow(2).mean().sqrt() < 0.5
    assert (speech.abs() >= 1).float().mean() < 0.01


def test_the_template_places_media_and_tools(checkpoint: Path) -> None:
    processor = Qwen3OmniMoeProcessor.from_pretrained(checkpoint)
    content = [{"type": "image"}, {"type": "audio"}, {"type": "text", "text": "Hm?"}]
    call = {"type": "function", "function": {"name": "look", "arguments": {"where": "up"}}}
    conversation = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "blue"},
    ]
    text = processor.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    media = "<|vision_start|><|image_pad|><|vision_end|><|audio_start|><|audio_pad|><|audio_end|>"
    assert f"<|im_start|>user\n{media}Hm?<|im_end|>\n" in text
    assert '<tool_call>\n{"name": "look", "arguments": {"where": "up"}}\n</tool_call><|im_end|>\n' in text
    assert text.endswith("<|im_start|>user\n<tool_response>\nblue\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_a_seed_makes_the_same_weights_again_and_another_seed_others(tmp_path: Path) -> None:
    files = [make_checkpoint(tmp_path / name, seed, "tiny") for name, seed in (("a", 3), ("b", 3), ("c", 4))]
    a, b, c = [(file / "model.safetensors").read_bytes() for file in files]
    assert a == b
    assert a != c


def test_sizes_share_no_dimension_that_code_could_take_for_granted() -> None:
    sizes = read_sizes(qwen3_omni.__file__, qwen3_omni.Qwen3OmniSizes)
    tiny, small = sizes["tiny"], sizes["small"]
    for part in ("thinker", "talker", "predictor", "code2wav"):
        for key in ("hidden_size", "num_hidden_layers", "intermediate_size"):
            assert getattr(getattr(tiny, part), key) != getattr(getattr(small, part), key), (part, key)
    for key in ("accept_hidden_layer", "code_groups", "codebook", "code2wav_window", "merges"):
        assert getattr(tiny, key) != getattr(small, key), key
