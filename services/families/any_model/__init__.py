"""A checkpoint that no other family is about: vLLM runs its architecture, and all else is found by looking at it."""

from collections.abc import Mapping
from typing import Any

from services.thinker.architectures import refusal, takes_media, transcribes


def has_speech(config: Mapping[str, Any]) -> bool:
    return False


def only_transcribes(config: Mapping[str, Any]) -> bool:
    """See `services.registry.Family.only_transcribes`."""
    return transcribes(config["architectures"][0])


def may_hear(config: Mapping[str, Any]) -> bool:
    """See `services.registry.Family.may_hear`."""
    return takes_media(config["architectures"][0])


def check(config: Mapping[str, Any]) -> None:
    """See `services.registry.Family.check`."""
    reason = refusal(config["architectures"], "auto_map" in config)
    if reason is not None:
        raise ValueError(reason)
