"""GPU memory of a checkpoint, as its config.json says. Windows and other layers that keep less are counted as whole
attention."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from services.families.any_model.generating import read_by_thinker
from services.families.any_model.sections import text_sections
from services.sizes import DTYPE_BYTES, Sizes, adapted_bytes, kv_bytes, weights_dtype


def sizes(config: Mapping[str, Any], tensors: Iterable[tuple[str, int]]) -> Sizes:
    """Raises ValueError, KeyError: config.json lacks a size."""
    *_, text = sections = text_sections(config)
    element = DTYPE_BYTES.get(weights_dtype(*sections), 2)
    if "decoder_layers" in text:  # attends to what it has written, and to the encoder
        text = _of_decoder(text)
    heads = text["num_attention_heads"]
    of_text = {**text, "num_key_value_heads": text.get("num_key_value_heads") or heads}
    if latent := text.get("kv_lora_rank"):  # one row for all heads
        kv_heads = 1
        per_token = text["num_hidden_layers"] * (latent + text["qk_rope_head_dim"]) * element
    else:
        kv_heads, per_token = of_text["num_key_value_heads"], kv_bytes(of_text, element)
    reads = read_by_thinker(config)
    adapted: dict[str, tuple[int, int]] = {}
    with suppress(KeyError, ValueError):  # no such layers
        adapted = adapted_bytes(of_text, element)
    return Sizes(
        weights={"thinker": sum(size for name, size in tensors if reads(name))},
        heads=heads,
        kv_heads=kv_heads,
        kv_per_token=per_token,
        max_context_tokens=text.get("max_position_embeddings"),
        adapted=adapted,
    )


def _of_decoder(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of a model with an encoder, by the names that decoders alone have."""
    return {
        "num_hidden_layers": 2 * config["decoder_layers"],
        "num_attention_heads": config["decoder_attention_heads"],
        "hidden_size": config["d_model"],
        "max_position_embeddings": config.get("max_target_positions"),
    }
