"""The media that a model takes, and how its prompts have them: by what its chat template writes for one."""

from collections import Counter
from typing import Any

from services.thinker.architectures import takes_media
from services.thinker.conversation import MediaKind
from services.thinker.family import templater

_PARTS: dict[MediaKind, str] = {
    "image": "image_processor",
    "audio": "feature_extractor",
    "video": "video_processor",
}


def placeholders(architecture: str, config: Any, processor: Any) -> tuple[dict[MediaKind, int], dict[MediaKind, str]]:
    """The token of each kind of medium in a prompt, and what a message has for it if the template takes texts alone.

    `config` is transformers' or vLLM's.
    """
    found: dict[MediaKind, int] = {}
    spelled: dict[MediaKind, str] = {}
    if not takes_media(architecture):
        return found, spelled
    for kind, part in _PARTS.items():
        if getattr(processor, part, None) is None:
            continue
        own, ids = "", _written(processor, kind)
        if not ids:
            own = _spelled(architecture, kind)
            ids = _added(processor.tokenizer, own)
        named = (
            getattr(holder, f"{kind}_token_{of}", None) for holder in (config, processor) for of in ("id", "index")
        )
        token_id = next((each for each in named if each in ids), ids[0] if len(ids) == 1 else None)
        if token_id is not None:
            found[kind] = token_id
            spelled |= {kind: own} if own else {}
    return found, spelled


def _written(processor: Any, kind: MediaKind) -> list[int]:
    """Added tokens that the template writes for a medium."""
    text = {"type": "text", "text": "a"}
    try:
        with_medium, without = (
            templater(processor).apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
            for parts in ([{"type": kind}, text], [text])
        )
    except Exception:  # a template may raise anything: this one takes texts
        return []
    more = Counter(_added(processor.tokenizer, with_medium)) - Counter(_added(processor.tokenizer, without))
    return list(more.elements())


def _spelled(architecture: str, kind: MediaKind) -> str:
    """What vLLM would write in a message; "" if it does not say, or counts the media."""
    from vllm import ModelRegistry

    model: Any = ModelRegistry.models[architecture].load_model_cls()
    try:
        first, second = (model.get_placeholder_str(kind, number) for number in (1, 2))
    except ValueError:
        return ""
    return first if first is not None and first == second else ""


def _added(tokenizer: Any, text: str) -> list[int]:
    return [
        each
        for each in tokenizer(text, add_special_tokens=False)["input_ids"]
        if each in tokenizer.added_tokens_decoder
    ]
