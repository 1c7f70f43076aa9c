"""OpenAI's and Anthropic's names of voices and models, and what they mean here."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

from gateway.pipeline.kinds import Output
from services.common.text import match_case

# Mapped to the model's voices in this order. New ones go to the end.
OPENAI_VOICES = (
    *("alloy", "ash", "ballad", "coral", "echo", "fable", "nova", "onyx", "sage", "shimmer", "verse"),
    *("marin", "cedar"),
    *("beacon", "bossa", "cinder", "delta", "gleam", "meridian", "quartz", "ripple", "shida", "stone", "tempo"),
    *("vesper", "willow"),
)

Purpose: TypeAlias = Literal[
    "answers", "messages", "speech", "transcription", "realtime", "image", "video", "audio", "embedding", "scores"
]
OUTPUTS: dict[Purpose, Output] = {
    "messages": "text",
    "speech": "speech",
    "transcription": "text",
    "realtime": "text",
    "image": "image",
    "video": "video",
    "audio": "audio",
    "embedding": "embedding",
    "scores": "scores",
}
# Names of models that do one thing only. Where that is done, they mean the model that does it here.
_FOREIGN_MODELS: dict[Purpose, tuple[str, ...]] = {
    "messages": ("claude-*",),
    "speech": ("tts-1*", "gpt-*-tts*"),
    "transcription": ("whisper-*", "gpt-*transcribe*"),
    "realtime": ("gpt-*realtime*", "gpt-*audio*", "gpt-*transcribe*", "gpt-live*", "whisper-*"),
    "image": ("dall-e-*", "gpt-image-*", "chatgpt-image-*"),
    "video": ("sora-*",),
    "embedding": ("text-embedding-*", "embed-*"),
    "scores": ("rerank-*", "jina-reranker-*"),
}


def is_foreign_model(name: str, purpose: Purpose) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _FOREIGN_MODELS.get(purpose, ()))


def is_openai_voice(name: str) -> bool:
    return name.lower() in OPENAI_VOICES


def own_voice(name: str, voices: Sequence[str]) -> str | None:
    """The voice among the model's `voices` that `name` means: its own, in any case, or one for OpenAI's; None: none."""
    own = match_case(name, voices)
    if own is None and voices and is_openai_voice(name):
        return voices[OPENAI_VOICES.index(name.lower()) % len(voices)]
    return own
