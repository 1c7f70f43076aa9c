"""Turns a realtime conversation into a job for the pipeline."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.answers.gateway import Gateway
from gateway.answers.jobs import MAX_INLINE_BYTES, MAX_START_BYTES, fill_tools
from gateway.answers.request import Tool
from gateway.answers.tools.calls import arguments_of
from gateway.answers.tools.image import MADE, NOT_MADE
from gateway.answers.tools.schema import IMAGE_TOOL
from gateway.dialects.realtime.audio import MODEL_RATE_HZ
from gateway.dialects.realtime.events import from_api
from gateway.dialects.realtime.items import Item, Sampled
from gateway.dialects.realtime.session import RetentionRatio, Session
from gateway.errors import ApiError
from gateway.media.check import MediaFile, load_media
from gateway.media.encode import BYTES_PER_SAMPLE, encode_audio
from gateway.pipeline.config import TalkerSampling
from gateway.pipeline.run import Job, speech
from quartet.v1 import media_pb2, talker_pb2, thinker_pb2

_KEPT_PART = 0.75
# Of the spectrograms that models hear.
_HOP_SAMPLES = MODEL_RATE_HZ // 100
_WINDOW_SAMPLES = MODEL_RATE_HZ // 40


@dataclass(frozen=True)
class Prompt:
    """What the model answers.

    Attributes:
        session: how.
        items: the conversation, oldest first.
        conversation_id: all its turns go to one thinker, which has those before in its prefix cache. "": any will do.
        tool: image_generation, as the model knows it; None: it is not offered.
        is_free: what was to be called has been: the model may say something, whatever the session's tool_choice.
    """

    session: Session
    items: Sequence[Item]
    conversation_id: str = ""
    tool: Tool | None = None
    is_free: bool = False

    def shortened(self) -> "Prompt | None":
        """One without its oldest items, a quarter of them if the session says nothing else; None: it cannot be shorter,
        or must not be. What is left does not begin with the output of a call that is gone."""
        asked = self.session.truncation
        if asked == "disabled" or len(self.items) < 2:
            return None
        kept_part = asked.ratio if isinstance(asked, RetentionRatio) else _KEPT_PART
        begin = min(max(1, math.ceil(len(self.items) * (1 - kept_part))), len(self.items) - 1)
        while begin < len(self.items) - 1 and self.items[begin].kind == "function_call_output":
            begin += 1
        return replace(self, items=self.items[begin:])

    def retained(self, tokens: int) -> "Prompt":
        """What the next turn begins with, after this one had `tokens`: less, if the session sets a limit."""
        asked = self.session.truncation
        limit = asked.post_instructions if isinstance(asked, RetentionRatio) else None
        return self if limit is None or tokens <= limit else self.shortened() or self

    def job(self, gateway: Gateway, request_id: str) -> Job:
        """The pipeline's job. Raises ApiError."""
        start = thinker_pb2.GenerateStart(sampling=self._sampling(gateway), lora=self.session.lora)
        thinker = gateway.pipeline.info("thinker")
        late = self._fill_messages(start, thinker is not None and "image" in thinker.input_modalities)
        self._fill_tools(start)
        if not start.messages:
            raise ApiError(400, "there is nothing to answer: no instructions, and no items", None, "empty_conversation")
        if start.ByteSize() > MAX_START_BYTES:
            reason = "the conversation is longer than a request can be; delete items"
            raise ApiError(400, reason, None, "context_length_exceeded")
        starts: dict[str, Any] = {"thinker": start}
        if self.speaks(gateway):
            sampling = gateway.talker_sampling(TalkerSampling(), None)
            starts |= speech(talker_pb2.SpeakStart(speaker=self.session.voice or "", sampling=sampling))
        return Job(request_id, starts, late, conversation_id=self.conversation_id)

    def speaks(self, gateway: Gateway) -> bool:
        """Whether the answer is heard, or only read."""
        return "audio" in self.session.modalities and gateway.pipeline.config.outputs.speech is not None

    def _sampling(self, gateway: Gateway) -> thinker_pb2.SamplingParameters:
        assert gateway.pipeline.config.thinker is not None, "a session needs a thinker"
        values = gateway.pipeline.config.thinker.sampling.model_dump(exclude_none=True)
        if (most := self.session.max_output_tokens) is not None:
            values["max_tokens"] = most
        return thinker_pb2.SamplingParameters(**values)

    def _fill_messages(self, start: thinker_pb2.GenerateStart, sees_images: bool) -> list[bytes]:
        """Writes the messages, and returns the files that follow them."""
        if self.session.instructions:
            start.messages.add(role="system").content.add(text=self.session.instructions)
        late: list[bytes] = []
        inline_bytes = 0
        for turn, sampled in _turns(self.items):
            for media, data in _fill(start, turn, sampled, sees_images):
                if inline_bytes + len(data) <= MAX_INLINE_BYTES:
                    media.data = data
                    inline_bytes += len(data)
                else:
                    media.size_bytes = len(data)
                    late.append(data)
        return late

    def _fill_tools(self, start: thinker_pb2.GenerateStart) -> None:
        for tool in self.session.tools:
            parameters = "" if tool.parameters is None else json.dumps(tool.parameters, ensure_ascii=False)
            start.tools.add(name=tool.name, description=tool.description or "", parameters_json=parameters)
        if self.tool is not None:
            fill_tools(start, [self.tool], None)
        if start.tools and not self.is_free:
            mode, name = f"MODE_{self.session.tool_choice.upper()}", self.session.tool_choice_name or ""
            start.tool_choice.CopyFrom(thinker_pb2.ToolChoice(mode=mode, name=name))


def _turns(items: Sequence[Item]) -> Iterator[tuple[Sequence[Item], Sampled | None]]:
    """The items of an answer together, where they are all there and as they were sampled; the others alone."""
    begin = 0
    while begin < len(items):
        sampled = items[begin].sampled
        turn = items[begin : begin + len(sampled.item_ids)] if sampled else ()
        if tuple(item.id for item in turn if item.sampled is sampled) != (sampled and sampled.item_ids):
            turn, sampled = items[begin : begin + 1], None
        yield turn, sampled
        begin += len(turn)


def _fill(
    start: thinker_pb2.GenerateStart, turn: Sequence[Item], sampled: Sampled | None, sees_images: bool
) -> list[tuple[media_pb2.Media, bytes]]:
    """Writes a turn's message, and returns its media without data, with their data."""
    item = turn[0]
    if sampled:
        answer = start.messages.add(role="assistant", token_ids=sampled.token_ids)
        for each in turn:  # for a thinker that is older than the ids
            _answer(answer, each)
    elif item.kind == "function_call":
        if item.members["status"] == "completed":
            _answer(_assistant(start), item)
    elif item.kind == "function_call_output":
        start.messages.add(role="tool", tool_call_id=item.members["call_id"]).content.add(text=item.members["output"])
    elif item.kind == "image_generation_call":
        return _fill_picture(start, item, sees_images)
    elif item.role == "assistant":
        if _said(item):
            _answer(start.messages.add(role="assistant"), item)
    else:
        return _fill_heard(start.messages.add(role=item.role), item)
    return []


def _fill_picture(
    start: thinker_pb2.GenerateStart, item: Item, sees_images: bool
) -> list[tuple[media_pb2.Media, bytes]]:
    """Writes the call of image_generation and what became of it; its picture is media without data."""
    arguments = arguments_of(item.members.get("revised_prompt", ""))
    _assistant(start).tool_calls.add(id=item.id, name=IMAGE_TOOL, arguments_json=arguments)
    result = start.messages.add(role="tool", tool_call_id=item.id)
    if not item.images:
        fault = item.members.get("error", {"message": "it was cancelled"})
        result.content.add(text=NOT_MADE + fault["message"])
        return []
    result.content.add(text=MADE)
    if not sees_images:
        return []
    media = media_pb2.Media(kind=media_pb2.MEDIA_KIND_IMAGE, field=item.id)
    return [(result.content.add(media=media).media, item.images[0])]


def _answer(result: thinker_pb2.ChatMessage, item: Item) -> None:
    """Adds an item of the assistant to its message."""
    members = item.members
    if item.kind == "function_call":
        arguments = members["arguments"] or "{}"
        result.tool_calls.add(id=members["call_id"], name=members["name"], arguments_json=arguments)
    elif text := _said(item):
        result.content.add(text=text)


def _said(item: Item) -> str:
    return "".join(part.get("text") or part.get("transcript") or "" for part in item.content)


def _fill_heard(result: thinker_pb2.ChatMessage, item: Item) -> list[tuple[media_pb2.Media, bytes]]:
    """Writes what the model is told, and returns its media without data, with their data."""
    pending = []
    for index, part in enumerate(item.content):
        field = f"{item.id}.content[{index}]"
        if part["type"] == "input_text":
            result.content.add(text=part["text"])
        elif part["type"] == "input_audio" and index not in item.sound:  # the session only wrote it down
            result.content.add(text=part["transcript"] or "")
        elif part["type"] == "input_audio":
            media = media_pb2.Media(kind=media_pb2.MEDIA_KIND_AUDIO, field=field)
            file = encode_audio(_ended_in_silence(item.sound[index]), MODEL_RATE_HZ, "wav")
            pending.append((result.content.add(media=media).media, file))
        else:
            media = media_pb2.Media(kind=media_pb2.MEDIA_KIND_IMAGE, field=field)
            pending.append((result.content.add(media=media).media, item.images[index]))
    return pending


def _ended_in_silence(pcm16: bytes) -> bytes:
    """The sound, whole hops of a spectrogram long, its last window silent: it sounds the same to the model whatever
    stands beside it, so a longer sound in a later turn does not cost the prefix cache those before."""
    samples = len(pcm16) // BYTES_PER_SAMPLE
    whole = -(-(samples + _WINDOW_SAMPLES) // _HOP_SAMPLES) * _HOP_SAMPLES
    return pcm16.ljust(whole * BYTES_PER_SAMPLE, b"\0")


def _assistant(start: thinker_pb2.GenerateStart) -> thinker_pb2.ChatMessage:
    """The assistant's message that calls go into: its last, unless others have spoken since, or it is given whole."""
    if start.messages and start.messages[-1].role == "assistant" and not start.messages[-1].token_ids:
        return start.messages[-1]
    return start.messages.add(role="assistant")


async def load_images(gateway: Gateway, item: Item, param: str) -> None:
    """Fetches and checks the item's images. Raises RealtimeError."""
    files = {
        index: MediaFile(f"{param}.content[{index}].image_url", "image", part["image_url"])
        for index, part in enumerate(item.content)
        if part["type"] == "input_image"
    }
    try:
        await load_media(gateway.fetcher, list(files.values()))
    except ApiError as error:
        raise from_api(error) from None
    item.images.update((index, file.content) for index, file in files.items())
