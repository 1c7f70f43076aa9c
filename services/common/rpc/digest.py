"""Digests by which a gateway knows whether processes serve the same model in the same way."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import huggingface_hub
from google.protobuf.json_format import MessageToDict

from quartet.v1 import server_info_pb2
from services.common.revisions import parted
from services.common.rpc.settings import StageSettings

_CONFIG_FILES = (  # which every stage of a checkpoint reads
    "config.json",
    "generation_config.json",
    "model_index.json",
    "modular_model_index.json",
    "llm_config.json",
    "vit_config.json",
    "speech_tokenizer/config.json",
    "scheduler/scheduler_config.json",
    "transformer/config.json",
    "vae/config.json",
)
# What depends on the writer of a file, and on a process's memory.
_NOTES = ("_name_or_path", "transformers_version", "_diffusers_version")
_LIMITS = ("max_context_tokens", "max_context_positions", "kv_block_tokens", "kv_blocks")


def checkpoint_digest(model: str) -> str:
    """Digest of the config files of `model`, a directory or the id of a cached model of the hub; "" if it has none.
    Spaces, the order of keys and notes on the writing program do not count."""
    found = {}
    for name in _CONFIG_FILES:
        path = Path(model) / name if Path(model).is_dir() else _cached(model, name)
        if path is not None and path.is_file():
            found[name] = _meaning(path)
    return _digest(found) if found else ""


def config_digest(
    info: server_info_pb2.GetServerInfoResponse, settings: StageSettings, volatile: Sequence[str] = ()
) -> str:
    """Digest of what a stage's outputs depend on beside the request.

    Args:
        info: complete, but for this digest.
        settings: of the stage.
        volatile: facts of its kind that change while it serves and do not count.
    """
    kind = info.WhichOneof("details")
    facts = MessageToDict(getattr(info, kind), preserving_proto_field_name=True) if kind else {}
    left_out = (*_LIMITS, *volatile)
    return _digest(
        {
            "stage": info.stage,
            "dtype": info.dtype,
            "facts": {name: value for name, value in facts.items() if name not in left_out},
            "settings": {name: getattr(settings, name) for name in settings.changes_outputs},
            "checkpoint": info.checkpoint_digest,
        }
    )


def _cached(model: str, name: str) -> Path | None:
    repository, revision = parted(model)
    try:
        path = huggingface_hub.try_to_load_from_cache(repository, name, revision=revision)
    except ValueError:  # no id of the hub
        return None
    return Path(path) if isinstance(path, str) else None  # else not cached, or known not to exist


def _meaning(path: Path) -> Any:
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if not isinstance(value, dict):
        return value
    return {key: part for key, part in cast("dict[str, Any]", value).items() if key not in _NOTES}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
