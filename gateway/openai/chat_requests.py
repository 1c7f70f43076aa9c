"""Turns a chat request into jobs for the pipeline."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message as ProtoMessage

from gateway.errors import ApiError, from_failure, invalid
from gateway.gateway import Gateway
from gateway.media.check import check
from gateway.media.fetch import MediaError, decode_base64
from gateway.openai.content import (
    AssistantMessage,
    InputAudioPart,
    Message,
    RefusalPart,
    TextPart,
    UserMessage,
    UserPart,
)
from gateway.openai.schema import ChatCompletionRequest, JsonObjectFormat, JsonSchemaFormat
from gateway.pipeline import job
from gateway.pipeline.job import Job, StageFailure
from quartet.v1 import media_pb2, talker_pb2, thinker_pb2
from services.common.rpc.channels import MAX_MESSAGE_BYTES
from services.common.rpc.errors import DeadlineExceeded

_MAX_START_BYTES = MAX_MESSAGE_BYTES - 64 * 1024  # the request's id and gRPC's own words come on top
MAX_INLINE_BYTES = 4 * 1024 * 1024  # of media in the start message; what is beyond follows in chunks
_PARALLEL_FETCHES = 8
# Members that say how text is written; those that say how it is sampled are not read where none is.
_FOR_WRITERS = ("tools", "tool_choice", "response_format", "logprobs", "top_logprobs")
_KINDS = {
    "image": media_pb2.MEDIA_KIND_IMAGE,
    "audio": media_pb2.MEDIA_KIND_AUDIO,
    "video": media_pb2.MEDIA_KIND_VIDEO,
}
_TOOL_CHOICES = {
    "auto": thinker_pb2.ToolChoice.MODE_AUTO,
    "none": thinker_pb2.ToolChoice.MODE_NONE,
    "required": thinker_pb2.ToolChoice.MODE_REQUIRED,
    "function": thinker_pb2.ToolChoice.MODE_FUNCTION,
}


@dataclass
class Pending:
    """A media part whose file is still to be had. `field` is the part's place in the request."""

    message: media_pb2.Media
    part: UserPart
    kind: str
    field: str


async def to_jobs(gateway: Gateway, request: ChatCompletionRequest, request_id: str) -> list[Job]:
    """One job for each answer, with the media fetched and checked.

    Raises:
        ApiError: 400 naming the field at fault.
    """
    config = gateway.pipeline.config
    _check(gateway, request)
    if config.thinker is None:
        starts, media = job.speech(_speak(gateway, request, text=text_to_speak(request))), []
    else:
        start, media = await _generate(gateway, request)
        starts = {"thinker": start} | (job.speech(_speak(gateway, request)) if request.speaks else {})
    return [
        _nth(starts, media, request_id if request.n in (None, 1) else f"{request_id}-{i}", i)
        for i in range(request.n or 1)
    ]


def _nth(starts: Mapping[str, ProtoMessage], media: list[bytes], request_id: str, index: int) -> Job:
    """The job of answer `index`, whose seeds are as many further."""
    copies: dict[str, Any] = {kind: deepcopy(start) for kind, start in starts.items()}
    for kind in copies.keys() & {"thinker", "talker"}:
        if copies[kind].sampling.HasField("seed"):
            copies[kind].sampling.seed += index
    return Job(request_id, copies, media)


def _check(gateway: Gateway, request: ChatCompletionRequest) -> None:
    """Raises ApiError: 400, the request contradicts itself, or this server cannot answer it so."""
    outputs, modalities = gateway.pipeline.config.outputs, request.modalities
    if "image" in (modalities or ()):
        raise invalid("modalities", "this model makes no images")
    if request.quartet.dit is not None:
        raise invalid("quartet.dit", "this model makes no images")
    if outputs.text is None:
        if not request.speaks:
            raise invalid("modalities", 'this model speaks the text it is sent: use ["audio"] or ["text", "audio"]')
        refuse_members(request, _FOR_WRITERS, "this model speaks the text it is sent; leave it out")
    elif modalities is not None and "text" not in modalities:
        raise invalid("modalities", 'speech always comes with its text: use ["text"] or ["text", "audio"]')
    if conflict := request.conflict():
        raise invalid(*conflict)
    if request.speaks and outputs.speech is None:
        raise invalid("modalities", "this server writes text only")
    if (request.n or 1) > gateway.settings.max_choices:
        raise invalid("n", f"at most {gateway.settings.max_choices} answers a request")


def refuse_members(request: ChatCompletionRequest, members: Iterable[str], reason: str) -> None:
    """Raises ApiError: 400 naming the first of `members` that says anything."""
    for name in members:
        if getattr(request, name):
            raise invalid(name, reason)


def last_user_message(request: ChatCompletionRequest, why: str) -> tuple[int, UserMessage]:
    """The user's last message, and its index. Raises ApiError: 400, there is none; `why` says what it is for."""
    for index, message in reversed(list(enumerate(request.messages))):
        if isinstance(message, UserMessage):
            return index, message
    raise invalid("messages", f"one of them must be the user's: {why}")


def text_to_speak(request: ChatCompletionRequest) -> str:
    """The text of the user's last message. Raises ApiError: 400 naming what is no text."""
    index, message = last_user_message(request, "it says what is spoken")
    texts = []
    for j, part in enumerate(message.content):
        if not isinstance(part, TextPart):
            raise invalid(f"messages[{index}].content[{j}]", "this model speaks text only")
        texts.append(part.text)
    return "\n".join(texts)


async def _generate(gateway: Gateway, request: ChatCompletionRequest) -> tuple[thinker_pb2.GenerateStart, list[bytes]]:
    """What the thinker gets, and the files that follow it."""
    _speaker(gateway, request)  # an unknown voice is refused whether or not it is to be heard
    sampling = _sampling(gateway, request)
    start = thinker_pb2.GenerateStart(use_audio_in_video=request.use_audio_in_video, sampling=sampling)
    pending: list[Pending] = []
    for i, message in enumerate(request.messages):
        _fill_message(start.messages.add(), gateway, message, i, pending)
    _fill_tools(start, request)
    if request.quartet.thinker.chat_template_kwargs:
        start.chat_template_kwargs_json = json.dumps(request.quartet.thinker.chat_template_kwargs)
    late_media = await _attach_media(gateway, pending)
    if start.ByteSize() > _MAX_START_BYTES:
        raise invalid("messages", "more text than a request can have", "context_length_exceeded")
    return start, late_media


def _speak(gateway: Gateway, request: ChatCompletionRequest, text: str | None = None) -> talker_pb2.SpeakRequest:
    """What the talker gets. `text` is None where a thinker writes it."""
    assert gateway.pipeline.config.talker is not None
    sampling = talker_pb2.TalkerSampling(**request.quartet.talker.over(gateway.pipeline.config.talker.sampling))
    if not sampling.HasField("seed") and request.seed is not None:
        sampling.seed = request.seed
    return talker_pb2.SpeakRequest(speaker=_speaker(gateway, request), sampling=sampling, text=text)


def _speaker(gateway: Gateway, request: ChatCompletionRequest) -> str:
    """The voice as the talker spells it; "" for its default."""
    voice = request.audio.voice if request.audio else None
    voices = gateway.pipeline.voices
    if voice is None or not voices:
        return voice or ""
    match = next((known for known in voices if known.lower() == voice.lower()), None)
    if match is None:
        raise invalid("audio.voice", f"no voice {voice!r}; use one of {', '.join(voices)}")
    return match


def _fill_message(
    result: thinker_pb2.ChatMessage, gateway: Gateway, message: Message, index: int, pending: list[Pending]
) -> None:
    result.role = "system" if message.role == "developer" else message.role
    result.name = getattr(message, "name", None) or ""
    for j, part in enumerate(message.content or ()):
        field = f"messages[{index}].content[{j}]"
        if isinstance(part, TextPart):
            result.content.add(text=part.text)
        elif isinstance(part, RefusalPart):
            result.content.add(text=part.refusal)
        elif isinstance(message, AssistantMessage):
            raise invalid(field, "this model reads images in the user's messages only")
        else:
            kind = "audio" if isinstance(part, InputAudioPart) else part.type.removesuffix("_url")
            media = result.content.add(media=media_pb2.Media(kind=_KINDS[kind], field=field)).media
            pending.append(Pending(media, part, kind, field))
    if isinstance(message, AssistantMessage):
        if message.audio and not message.content:
            transcript = gateway.transcripts.get(message.audio.id)
            if transcript is None:
                reason = f"{message.audio.id!r} is unknown or has expired; send the answer's text as content instead"
                raise invalid(f"messages[{index}].audio.id", reason)
            result.content.add(text=transcript)
        for call in message.tool_calls or ():
            result.tool_calls.add(id=call.id, name=call.function.name, arguments_json=call.function.arguments)
        if not result.content and not result.tool_calls:
            raise invalid(f"messages[{index}].content", "required unless there are tool_calls or audio")
    elif message.role == "tool":
        result.tool_call_id = message.tool_call_id


def _sampling(gateway: Gateway, request: ChatCompletionRequest) -> thinker_pb2.SamplingParameters:
    assert gateway.pipeline.config.thinker is not None, "text was asked of a pipeline without a thinker"
    values = request.over(gateway.pipeline.config.thinker.sampling)
    if request.max_completion_tokens is not None:
        values["max_tokens"] = request.max_completion_tokens
    message = thinker_pb2.SamplingParameters(**values, stop=request.stop, logit_bias=request.logit_bias)
    if request.logprobs:
        message.top_logprobs = request.top_logprobs or 0
    match request.response_format:
        case JsonObjectFormat():
            message.json_object = True
        case JsonSchemaFormat(json_schema=schema):
            message.json_schema = json.dumps(schema.json_schema, ensure_ascii=False)
    return message


def _fill_tools(start: thinker_pb2.GenerateStart, request: ChatCompletionRequest) -> None:
    for tool in request.tools or ():
        function = tool.function
        parameters = "" if function.parameters is None else json.dumps(function.parameters, ensure_ascii=False)
        start.tools.add(name=function.name, description=function.description or "", parameters_json=parameters)
    if choice := request.tool_choice:
        start.tool_choice.mode = _TOOL_CHOICES[choice.type]
        start.tool_choice.name = choice.function.name if choice.function else ""


async def _attach_media(gateway: Gateway, pending: list[Pending]) -> list[bytes]:
    """Fetches the files and puts them into their messages; returns those that have to follow in chunks."""
    late, inline_bytes = [], 0
    for item, content in zip(pending, await load_media(gateway, pending), strict=True):
        if inline_bytes + len(content) <= MAX_INLINE_BYTES:
            item.message.data = content
            inline_bytes += len(content)
        else:
            item.message.size_bytes = len(content)
            late.append(content)
    return late


async def load_media(gateway: Gateway, pending: list[Pending]) -> list[bytes]:
    """Fetches and checks the files. Raises ApiError: 400 naming the first part at fault; 504, too slow."""
    settings = gateway.settings
    if len(pending) > settings.media_max_parts:
        reason = f"the request has {len(pending)} media parts; at most {settings.media_max_parts} are allowed"
        raise invalid(pending[settings.media_max_parts].field, reason)
    slots = asyncio.Semaphore(_PARALLEL_FETCHES)
    total_bytes = 0

    async def load(item: Pending) -> bytes | ApiError:
        nonlocal total_bytes
        try:
            async with slots:
                content = await _bytes(gateway, item)
                total_bytes += len(content)
                if total_bytes > settings.media_max_total_bytes:
                    raise MediaError(f"all media together are more than {settings.media_max_total_bytes} bytes")
                await asyncio.to_thread(check, item.kind, content, settings)
                return content
        except MediaError as error:
            return invalid(item.field, str(error), "invalid_media")

    try:
        async with asyncio.timeout(settings.request_timeout_s):
            loaded = await asyncio.gather(*map(load, pending))
    except TimeoutError:
        error = DeadlineExceeded(f"the request's media took longer than its {settings.request_timeout_s:g} s")
        raise from_failure(StageFailure("gateway", error)) from None
    files = []
    for content in loaded:
        if isinstance(content, ApiError):
            raise content
        files.append(content)
    return files


async def _bytes(gateway: Gateway, item: Pending) -> bytes:
    if isinstance(item.part, InputAudioPart):
        most = gateway.settings.media_max_bytes
        return await asyncio.to_thread(decode_base64, item.part.input_audio.data, most)
    url = getattr(item.part, item.part.type).url
    return await gateway.fetcher.get(url, item.kind)
