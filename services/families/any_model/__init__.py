"""A checkpoint that no other family is about: vLLM runs its architecture, and all else is found by looking at it."""

from collections.abc import Mapping, Sequence
from typing import Any

from services.thinker import architectures
from services.thinker.architectures import embeds, refusal, scores, takes_media


def has_speech(config: Mapping[str, Any]) -> bool:
    return False


def only_transcribes(config: Mapping[str, Any]) -> bool:
    """See `services.registry.Family.only_transcribes`."""
    return architectures.only_transcribes(config["architectures"][0])


def may_hear(config: Mapping[str, Any]) -> bool:
    """See `services.registry.Family.may_hear`."""
    return takes_media(config["architectures"][0])


def only_stages(config: Mapping[str, Any]) -> Sequence[str]:
    """See `services.registry.Family.stages`."""
    name = config["architectures"][0]
    return ("embedder",) if embeds(name) or scores(name, _classes(config)) else ()


def _classes(config: Mapping[str, Any]) -> int:
    """That a model sorts texts into; 2 is transformers' default."""
    labels = config.get("id2label")
    return len(labels) if labels else int(config.get("num_labels", 2))


def check(config: Mapping[str, Any]) -> None:
    """See `services.registry.Family.check`."""
    if only_stages(config):
        return
    reason = refusal(config["architectures"], "auto_map" in config)
    if reason is not None:
        raise ValueError(reason)
