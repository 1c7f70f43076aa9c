"""Turns a chat request into jobs for the pipeline."""

import asyncio
import json
from dataclasses import dataclass

from gateway.gateway import Gateway
from gateway.media.check import check
from gateway.media.fetch import MediaError, decode_base64
from gateway.openai.content import AssistantMessage, InputAudioPart, Message, RefusalPart, TextPart, UserPart
from gateway.openai.errors import ApiError, invalid
from gateway.openai.schema import ChatCompletionRequest, JsonObjectFormat, JsonSchemaFormat
from gateway.pipeline.job import Job, Speech
from quartet.v1 import media_pb2, thinker_pb2
from services.common.rpc.channels import MAX_MESSAGE_BYTES

_MAX_START_BYTES = MAX_MESSAGE_BYTES - 64 * 1024  # the request's id and gRPC's own words come on top
MAX_INLINE_BYTES = 4 * 1024 * 1024  # of media in the start message; what is beyond follows in chunks
_PARALLEL_FETCHES = 8
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
    settings, pipeline = gateway.settings, gateway.pipeline
    if "image" in (request.modalities or ()):
        raise invalid("modalities", "this model makes no pictures")
    if request.quartet.dit is not None:
        raise invalid("quartet.dit", "this model makes no pictures")
    if conflict := request.conflict():
        raise invalid(*conflict)
    if request.speaks and pipeline.outputs.audio is None:
        raise invalid("modalities", "this server writes text only")
    if (request.n or 1) > settings.max_choices:
        raise invalid("n", f"at most {settings.max_choices} answers a request")
    speaker = _speaker(gateway, request)

    start = thinker_pb2.GenerateStart(use_audio_in_video=request.use_audio_in_video)
    pending: list[Pending] = []
    for i, message in enumerate(request.messages):
        _fill_message(start.messages.add(), gateway, message, i, pending)
    _fill_sampling(start.sampling, request, gateway)
    _fill_tools(start, request)
    if request.quartet.thinker.chat_template_kwargs:
        start.chat_template_kwargs_json = json.dumps(request.quartet.thinker.chat_template_kwargs)
    late_media = await _attach_media(gateway, pending)
    if start.ByteSize() > _MAX_START_BYTES:
        raise invalid("messages", "more text than a request can have", "context_length_exceeded")

    jobs = []
    for i in range(request.n or 1):
        copy = thinker_pb2.GenerateStart()
        copy.CopyFrom(start)
        copy.request_id = request_id if request.n in (None, 1) else f"{request_id}-{i}"
        if copy.sampling.HasField("seed"):
            copy.sampling.seed += i
        speech = None
        if request.speaks:
            assert pipeline.talker is not None
            talker = request.quartet.talker.to_message(pipeline.talker.sampling)
            if not talker.HasField("seed") and request.seed is not None:
                talker.seed = request.seed
            if talker.HasField("seed"):
                talker.seed += i
            speech = Speech(speaker, talker)
        jobs.append(Job(copy, late_media, speech))
    return jobs


def _speaker(gateway: Gateway, request: ChatCompletionRequest) -> str:
    """The voice as the talker spells it; "" for its default."""
    voice = request.audio.voice if request.audio else None
    voices = gateway.stages.voices
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
            raise invalid(field, "this model reads pictures in the user's messages only")
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


def _fill_sampling(message: thinker_pb2.SamplingParameters, request: ChatCompletionRequest, gateway: Gateway) -> None:
    assert gateway.pipeline.thinker is not None, "a chat was asked of a pipeline without text"
    request.fill(message, gateway.pipeline.thinker.sampling)
    if request.max_completion_tokens is not None:
        message.max_tokens = request.max_completion_tokens
    message.stop.extend(request.stop or ())
    for token_id, bias in (request.logit_bias or {}).items():
        message.logit_bias[token_id] = bias
    if request.logprobs:
        message.top_logprobs = request.top_logprobs or 0
    match request.response_format:
        case JsonObjectFormat():
            message.json_object = True
        case JsonSchemaFormat(json_schema=schema):
            message.json_schema = json.dumps(schema.json_schema, ensure_ascii=False)


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
    """Fetches and checks the files. Raises ApiError: 400 naming the first part at fault."""
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

    files = []
    for content in await asyncio.gather(*map(load, pending)):
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
