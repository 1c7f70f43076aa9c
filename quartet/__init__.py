"""Omni-modal models from Python, without HTTP: `from quartet import Omni`; see docs/python.md.

Names are imported lazily: a stage, which needs only the stubs in `quartet.v1`, must not load the gateway."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cli.plan import Tls
    from quartet.answers import Answer, Audio, AudioDelta, ImageDelta, TextDelta
    from quartet.async_omni import AsyncOmni
    from quartet.errors import Error, StartError
    from quartet.media import audio, image, video
    from quartet.messages import Chat
    from quartet.omni import Omni

_NAMES = {
    "cli.plan": ("Tls",),
    "quartet.answers": ("Answer", "Audio", "AudioDelta", "ImageDelta", "TextDelta"),
    "quartet.async_omni": ("AsyncOmni",),
    "quartet.errors": ("Error", "StartError"),
    "quartet.media": ("audio", "image", "video"),
    "quartet.messages": ("Chat",),
    "quartet.omni": ("Omni",),
}
_PLACES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "Answer",
    "AsyncOmni",
    "Audio",
    "AudioDelta",
    "Chat",
    "Error",
    "ImageDelta",
    "Omni",
    "StartError",
    "TextDelta",
    "Tls",
    "audio",
    "image",
    "video",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'quartet' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_PLACES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
