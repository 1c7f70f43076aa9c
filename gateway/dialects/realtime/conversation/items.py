"""Items of a conversation, parsed from what clients send."""

import asyncio
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gateway.dialects.realtime.audio import InputAudioStream
from gateway.dialects.realtime.events import new_id, wrong
from gateway.media.fetch import from_base64

_PARTS = {
    "user": {"input_text": "text", "input_audio": "audio", "input_image": "image_url"},
    "system": {"input_text": "text"},
    "assistant": {"output_text": "text", "output_audio": "transcript"},
}
# Names that clients of the beta, and some SDKs, still use.
_OLD_NAMES = {"assistant": {"text": "output_text", "audio": "output_audio"}, "system": {"text": "input_text"}}
_FIELDS = {"function_call": ("name", "arguments"), "function_call_output": ("call_id", "output")}
_MAX_ID_CHARACTERS = 64
_MAX_PARTS = 256  # of a message
_PART_BYTES = 256  # of memory, beside its text


@dataclass(frozen=True)
class SampledAnswer:
    """An answer's token ids, and the ids of its items in order."""

    token_ids: Sequence[int]
    item_ids: tuple[str, ...]


@dataclass(frozen=True)
class SpokenWord:
    """A word of an answer: the end of its text, in characters of the answer's, and the middle of its sound."""

    text_end: int
    middle_ms: float


@dataclass
class Item:
    """One item.

    Attributes:
        members: OpenAI's form of it, without sound.
        sound: PCM16, mono, 16 kHz, by the content index of each `input_audio`.
        writing: held by who writes it down.
        images: files by the content index of each `input_image`; index 0 for a generated image.
        sent_ms: sound of an answer that the client has received.
        sampled: the answer, shared by its items; None: unknown, or the items do not match.
        words: of an answer's sound, in order; empty: their times are not known.
        is_cut: the user did not hear all, so later deltas do not change it.
        is_forgotten: prompts leave it out, as the conversation was too long.
    """

    members: dict[str, Any]
    sound: dict[int, bytes] = field(default_factory=dict)
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    images: dict[int, bytes] = field(default_factory=dict)
    sent_ms: int = 0
    sampled: SampledAnswer | None = None
    words: Sequence[SpokenWord] = ()
    is_cut: bool = False
    is_forgotten: bool = False

    @property
    def id(self) -> str:
        return self.members["id"]

    @property
    def kind(self) -> str:
        """ "message", "function_call", "function_call_output", or that of a hosted tool's call."""
        return self.members["type"]

    @property
    def role(self) -> str:
        """ "" if the item is no message."""
        return self.members.get("role", "")

    @property
    def content(self) -> list[dict[str, Any]]:
        return self.members.get("content", [])

    @property
    def size_bytes(self) -> int:
        parts = [self.members, *self.content]
        texts = (text for part in parts for text in part.values() if isinstance(text, str))
        of_parts = _PART_BYTES * len(parts) + sum(map(len, texts))
        return of_parts + sum(map(len, self.sound.values())) + sum(map(len, self.images.values()))

    def public(self) -> dict[str, Any]:
        """A copy of OpenAI's form of it, for events."""
        return deepcopy(self.members)


def new_item(type: str, status: str = "completed", id: str | None = None, **members: Any) -> Item:
    return Item({"id": id or new_id("item"), "object": "realtime.item", "type": type, "status": status, **members})


def message(role: str, content: list[dict[str, Any]], status: str = "completed", id: str | None = None) -> Item:
    return new_item("message", status, id, role=role, content=content)


def spoken(pcm16: bytes, id: str | None = None) -> Item:
    """A user's message of mono sound at 16 kHz."""
    item = message("user", [{"type": "input_audio", "transcript": None}], id=id)
    item.sound[0] = pcm16
    return item


def parse_item(members: Any, audio_format: str, param: str = "item") -> Item:
    """Parses an item at `param` of an event. Loads no images. Raises RealtimeError."""
    if not isinstance(members, dict):
        raise wrong(param, "must be an object")
    kind, id = members.get("type", "message" if "role" in members else None), members.get("id")
    if id is not None and not (isinstance(id, str) and 0 < len(id) <= _MAX_ID_CHARACTERS):
        raise wrong(f"{param}.id", f"must be a text of 1 to {_MAX_ID_CHARACTERS} characters")
    if kind == "message":
        return _message(members, id, audio_format, param)
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise wrong(f"{param}.type", f"{kind!r} is none of message, function_call, function_call_output")
    own = {name: _text(members, name, param) for name in _FIELDS[kind]}
    if kind == "function_call":
        own["call_id"] = _text(members, "call_id", param) if members.get("call_id") else new_id("call")
    return new_item(kind, id=id, **own)


def _message(members: dict[str, Any], id: str | None, audio_format: str, param: str) -> Item:
    role = members.get("role")
    if not isinstance(role, str) or role not in _PARTS:
        raise wrong(f"{param}.role", f"{role!r} is none of user, assistant, system")
    parts = members.get("content")
    if not isinstance(parts, list) or not parts:
        raise wrong(f"{param}.content", "must be a list of at least one part")
    if len(parts) > _MAX_PARTS:
        raise wrong(f"{param}.content", f"has {len(parts)} parts; a message has {_MAX_PARTS} at most: send several")
    status = "incomplete" if members.get("status") in ("incomplete", "in_progress") else "completed"
    item = message(role, [], status, id)
    for index, part in enumerate(parts):
        place = f"{param}.content[{index}]"
        if not isinstance(part, dict):
            raise wrong(place, "must be an object")
        kind = str(part.get("type"))
        kind = _OLD_NAMES.get(role, {}).get(kind, kind)
        name = _PARTS[role].get(kind)
        if name is None:
            raise wrong(f"{place}.type", f"{kind!r} is none of {', '.join(_PARTS[role])}, which role {role} has")
        public: dict[str, Any] = {"type": kind}
        if kind == "input_audio":
            item.sound[index] = _sound(_text(part, name, place), audio_format, f"{place}.{name}")
            transcript = part.get("transcript")
            public["transcript"] = transcript if isinstance(transcript, str) else None
        else:
            public[name] = _text(part, name, place)
        item.content.append(public)
    return item


def _sound(data: str, audio_format: str, param: str) -> bytes:
    reader = InputAudioStream(audio_format)
    samples = np.concatenate([reader.add(decode_base64(data, param)), reader.flush()])
    if not samples.size:
        raise wrong(param, "the sound is empty")
    return samples.astype("<i2").tobytes()


def decode_base64(data: str, param: str) -> bytes:
    try:
        return from_base64(data)
    except ValueError:
        raise wrong(param, "is not base64") from None


def _text(members: dict[str, Any], name: str, param: str) -> str:
    value = members.get(name)
    if not isinstance(value, str):
        raise wrong(f"{param}.{name}", "must be a text")
    return value


def parse_items(members: Any, audio_format: str, known: Callable[[str], Item | None]) -> list[Item]:
    """Parses response.input: items, and references to items that `known` finds by id. Raises RealtimeError."""
    if not isinstance(members, list):
        raise wrong("response.input", "must be a list of items")
    items = []
    for index, each in enumerate(members):
        place = f"response.input[{index}]"
        if isinstance(each, dict) and each.get("type") == "item_reference":
            found = known(_text(each, "id", place))
            if found is None:
                raise wrong(f"{place}.id", f"no item {each['id']!r} is in the conversation")
            items.append(found)
        else:
            items.append(parse_item(each, audio_format, place))
    return items
