"""What an embedder's checkpoint is, by its files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.engine.weights import Checkpoint, compute_dtype, stored_tensors
from services.common.telemetry import logs
from services.embedder.config import EmbedderSettings
from services.registry import embedder_pipeline, read_config, scores_pairs

_FILES = ("*.json", "*.txt", "*.model", "*_Dense/*")  # configurations, tokenizer, layers behind the pooling
_STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class EmbedderCheckpoint:
    """A checkpoint that makes embeddings, or scores pairs.

    Attributes:
        folder: its directory.
        dtype: of its weights, e.g. "float32".
        scores: whether it scores pairs of texts; else it makes embeddings.
        tokenizer: transformers' own.
        positions: longest prompt, where config.json counts some that no token has; None: all that it counts.
    """

    folder: Path
    dtype: str
    scores: bool
    tokenizer: Any
    positions: int | None = None


def load_checkpoint(settings: EmbedderSettings) -> EmbedderCheckpoint:
    """Reads the checkpoint of the settings; fetches its weights.

    Raises:
        ValueError: no such checkpoint, or one that does neither; its tokenizer is code of its own.
        OSError: files are missing.
    """
    from transformers import AutoTokenizer

    logs.adopt("transformers")
    files = Checkpoint(settings.model, _FILES)
    folder, config = files.folder, read_config(files.folder)
    if embedder_pipeline(folder, config) is None and settings.pooling == "auto":
        name = (config.get("architectures") or ["missing"])[0]
        reason = f"config.json's architecture is {name}, and no modules.json says how embeddings are made of its states"
        raise ValueError(f"{folder}: {reason}; give --pooling, or a model that makes embeddings or scores pairs")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except ValueError as error:
        raise ValueError(f"{folder}: its tokenizer cannot be read: {error}") from None
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError(f"{folder}: its tokenizer, {type(tokenizer).__name__}, has no tokenizer.json, which is needed")
    files.fetch(lambda name: True)
    return EmbedderCheckpoint(folder, _dtype(folder, config), scores_pairs(config), tokenizer, _positions(config))


def _positions(config: dict[str, Any]) -> int | None:
    """RoBERTa's positions begin behind that of padding: vLLM would read past the end of its table."""
    if "roberta" not in str(config.get("model_type")) or not config.get("max_position_embeddings"):
        return None
    return config["max_position_embeddings"] - config.get("pad_token_id", 1) - 1


def _dtype(folder: Path, config: dict[str, Any]) -> str:
    """What config.json says, else that of the stored weights: vLLM's own choice would make float32 shorter."""
    import torch

    stored = next((_STORED[tensor.dtype] for tensor in stored_tensors(folder) if tensor.dtype in _STORED), "float32")
    return str(compute_dtype(config, getattr(torch, stored))).removeprefix("torch.")
