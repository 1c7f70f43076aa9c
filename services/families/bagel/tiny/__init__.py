"""Random checkpoints with the published files, config keys, weight names and tokenizer."""

import json
from pathlib import Path
from typing import Any

from services.families.bagel.files import LLM, VISION
from services.families.bagel.thinker_config import ARCHITECTURE, MODEL_TYPE
from services.families.bagel.tiny.shape import BagelShape
from services.families.tiny_sizes import read_table

_LLM = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "model_type": "qwen2",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_sliding_window": False,
}


def write_checkpoint(out: Path, size: str) -> None:
    """Writes a checkpoint into `out`, float32, with weights from torch's global generator. Raises KeyError: no such
    size."""
    from services.families.bagel.tiny.weights import write_weights
    from services.families.qwen3_omni.tiny.processor import make_tokenizer
    from services.families.tiny_parts import padded_vocabulary, token_ids, write_json

    shape = BagelShape(**read_table(__file__, "sizes")[size])
    tokenizer: Any = make_tokenizer(shape.merges)
    ids = token_ids(tokenizer, {"bos_token_id": "<|endoftext|>", "eos_token_id": "<|im_end|>"})
    vocabulary = padded_vocabulary(len(tokenizer))
    llm = {**_LLM, **shape.llm, **ids, "vocab_size": vocabulary}
    write_json(out / LLM, llm)
    image = shape.vision_side * shape.vision["patch_size"]
    vision = {**shape.vision, "image_size": image, "model_type": "siglip_vision_model"}
    write_json(out / VISION, vision)
    whole = {"llm_config": llm, "vit_config": vision, "vit_max_num_patch_per_side": shape.vision_side}
    write_json(out / "config.json", {"architectures": [ARCHITECTURE], "model_type": MODEL_TYPE, **ids, **whole})
    tokenizer.save_pretrained(out)
    bpe = json.loads((out / "tokenizer.json").read_text())["model"]  # the published program reads two other files
    write_json(out / "vocab.json", bpe["vocab"])
    merges = (pair if isinstance(pair, str) else " ".join(pair) for pair in bpe["merges"])
    (out / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    write_weights(out, shape, tokenizer)


ARCHS = {"bagel": write_checkpoint}
