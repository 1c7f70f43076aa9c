"""Checkpoints that also make pictures: which of their weights vLLM does not load."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _Skipped:
    """Parts of names, beginnings of names, and folders, of tensors that only a dit reads."""

    parts: tuple[str, ...]
    beginnings: tuple[str, ...]
    folders: tuple[str, ...]


_SKIPPED = {
    "Cosmos3ForConditionalGeneration": _Skipped(
        ("_moe_gen", ".add_q_proj.", ".add_k_proj.", ".add_v_proj.", ".to_add_out.", ".norm_added_"),
        ("proj_in.", "proj_out.", "time_embedder.", "audio_", "action_"),
        ("vae", "sound_tokenizer"),
    ),
}
"""By vLLM's architecture, as its models skip them."""


def read_by_thinker(config: Mapping[str, Any]) -> Callable[[str], bool]:
    """Whether a thinker loads the tensor of a name, "folder/name" or "name", of a checkpoint with this config.json."""
    skipped = next((_SKIPPED[name] for name in config.get("architectures") or () if name in _SKIPPED), None)
    if skipped is None:
        return lambda name: True

    def reads(name: str) -> bool:
        folder, _, own = name.rpartition("/")
        is_skipped = folder in skipped.folders or own.startswith(skipped.beginnings)
        return not is_skipped and not any(part in own for part in skipped.parts)

    return reads
