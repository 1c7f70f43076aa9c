"""A talker's sizes and sampling defaults as checkpoints state them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.talker.family import TransformerSpec


def rope_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rope of a transformer. transformers 5 writes `rope_parameters`; published config.json have the other keys."""
    scaling: Mapping[str, Any] = config.get("rope_scaling") or {}
    return config.get("rope_parameters") or {"rope_theta": config["rope_theta"], **scaling}


def transformer_spec(config: Mapping[str, Any], name: str, **others: Any) -> TransformerSpec:
    """The stack that `config` describes. Errors call it `name`.

    Args:
        others: fields of the spec that do not follow from `config`.

    Raises:
        ValueError: its rope or its attention is not supported.
        KeyError: a key is missing.
    """
    rope = rope_of(config)
    if rope.get("rope_type", rope.get("type", "default")) not in ("default", "mrope"):
        raise ValueError(f"{name}: rope {dict(rope)} is not supported, only default")
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        raise ValueError(f"{name}.use_sliding_window: sliding-window layers are not supported")
    biased: bool = config.get("attention_bias", False)
    stated: dict[str, Any] = {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "kv_heads": config["num_key_value_heads"],
        "head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "intermediate": config["intermediate_size"],
        "vocab": config["vocab_size"],
        "norm_eps": config["rms_norm_eps"],
        "rope_theta": rope["rope_theta"],
        "activation": config["hidden_act"],
        "qkv_bias": biased,
        "o_bias": biased,
    }
    return TransformerSpec(**stated | others)


def generation_values(folder: Path) -> dict[str, Any]:
    """The members of the checkpoint's generation_config.json, if it has one."""
    path = folder / "generation_config.json"
    return json.loads(path.read_text()) if path.is_file() else {}
