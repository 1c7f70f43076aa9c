"""A checkpoint of `quartet tiny` in the shape that Qwen3-Omni-30B-A3B-Instruct was published in.

That one was written by transformers 4.57: a config.json with the keys of that time, bfloat16 weights in shards with an
index, a tokenizer of vocab.json and merges.txt alone, preprocessor_config.json and chat_template.json. Seen in public
dumps of these files.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SHARDS = 5
# What every part's config had from its base class, whether or not the part generates anything.
GENERATION_KEYS = (
    dict.fromkeys(("bad_words_ids", "begin_suppress_tokens", "decoder_start_token_id", "forced_bos_token_id"))
    | dict.fromkeys(("forced_eos_token_id", "prefix", "sep_token_id", "suppress_tokens", "tokenizer_class"))
    | dict.fromkeys(("do_sample", "early_stopping", "is_decoder", "torchscript", "use_bfloat16"), False)
    | {"max_length": 20, "min_length": 0, "num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0}
    | {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "typical_p": 1.0, "pruned_heads": {}, "torch_dtype": None}
)


def publish(tiny: Path, out: Path) -> Path:
    """Writes the checkpoint `tiny` into the new directory `out` as the published one is, and returns `out`."""
    out.mkdir()
    _write(out / "config.json", _config(json.loads((tiny / "config.json").read_text())))
    generation = json.loads((tiny / "generation_config.json").read_text())
    _write(out / "generation_config.json", {k: v for k, v in generation.items() if k.startswith("talker_")})
    _write_weights(load_file(tiny / "model.safetensors"), out)
    _write_tokenizer(tiny, out)
    processor = json.loads((tiny / "processor_config.json").read_text())
    image, audio = processor["image_processor"], processor["feature_extractor"]
    size = image.pop("size")
    pixels = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    _write(out / "preprocessor_config.json", {**image, **audio, **pixels, "processor_class": "Qwen3OmniMoeProcessor"})
    _write(out / "chat_template.json", {"chat_template": (tiny / "chat_template.jinja").read_text()})
    return out


def _config(config: dict[str, Any]) -> dict[str, Any]:
    thinker, talker, code2wav = (config[f"{part}_config"] for part in ("thinker", "talker", "code2wav"))
    for part in (thinker["text_config"], talker["text_config"], talker["code_predictor_config"], code2wav):
        rope = part.pop("rope_parameters")
        part["rope_theta"] = int(rope.pop("rope_theta"))
        part["rope_scaling"] = rope if "mrope_section" in rope else None
    del talker["text_config"]["rope_scaling"]["mrope_interleaved"]  # of the thinker's only
    del code2wav["rope_scaling"], thinker["vision_config"]["rope_parameters"]
    talker["text_config"]["num_experts"] = talker["text_config"].pop("num_local_experts")
    for part in (*(thinker[f"{part}_config"] for part in ("text", "audio", "vision")), talker["code_predictor_config"]):
        del part["dtype"]
        part |= GENERATION_KEYS
    thinker["text_config"] |= {"shared_expert_intermediate_size": 0, "use_qk_norm": True, "use_sliding_window": False}
    thinker["vision_config"]["in_chans"] = thinker["vision_config"]["in_channels"]
    thinker["torch_dtype"] = "bfloat16"
    talker |= {"model_type": "qwen3_omni_moe_talker", "output_router_logits": False}
    code2wav |= {"codebook_dim": 512, "num_semantic_quantizers": 1, "semantic_codebook_size": 4096}
    del config["dtype"]
    return config | {"torch_dtype": "bfloat16", "transformers_version": "4.57.0.dev0"}


def _write_weights(weights: dict[str, torch.Tensor], out: Path) -> None:
    """Shards of about the same number of tensors: the thinker's first, then code2wav's and the talker's. One has
    tensors of all."""
    names = sorted(weights, key=lambda name: (not name.startswith("thinker."), name))
    size = -(-len(names) // SHARDS)
    index: dict[str, str] = {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        part = {name: weights[name].bfloat16() for name in names[shard * size : (shard + 1) * size]}
        save_file(part, out / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    total = sum(2 * weight.numel() for weight in weights.values())
    _write(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})


def _write_tokenizer(tiny: Path, out: Path) -> None:
    whole = json.loads((tiny / "tokenizer.json").read_text())
    _write(out / "vocab.json", whole["model"]["vocab"])
    (out / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, whole["model"]["merges"])]) + "\n")
    config = json.loads((tiny / "tokenizer_config.json").read_text())
    del config["backend"]
    added = {token.pop("id"): token for token in whole["added_tokens"]}
    special = [token["content"] for token in added.values() if token["special"]]
    config |= {"added_tokens_decoder": added, "additional_special_tokens": special, "unk_token": None}
    config |= {"add_bos_token": False, "add_prefix_space": False, "clean_up_tokenization_spaces": False}
    config |= {"errors": "replace", "model_max_length": 131_072, "split_special_tokens": False}
    _write(out / "tokenizer_config.json", config)


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2))
