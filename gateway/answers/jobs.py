"""Makes jobs for the pipeline of a chat request."""

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from google.protobuf.message import Message as ProtoMessage

from gateway.answers import conversation
from gateway.answers.conversation import Message, UserMessage
from gateway.answers.extensions import OF_ONE_TEXT, StructuralTagFormat
from gateway.answers.gateway import Gateway
from gateway.answers.request import (
    AnyTool,
    ChatCompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    Tool,
    ToolChoice,
    WriterSampling,
)
from gateway.answers.voice_options import VoiceId, VoiceOptions, plan_speech
from gateway.errors import invalid
from gateway.media.check import MediaFile, load_media
from gateway.pipeline.run import Job, speech
from gateway.pipeline.sampling import TalkerSampling
from quartet.v1 import media_pb2, talker_pb2, thinker_pb2
from services.common.rpc.channels import MAX_MESSAGE_BYTES

MAX_START_BYTES = MAX_MESSAGE_BYTES - 64 * 1024  # the request's id and gRPC's own words come on top
MAX_INLINE_BYTES = 4 * 1024 * 1024  # of media in the start message; what is beyond follows in chunks
# Members that say how text is written; those that say how it is sampled are not read where none is.
_FOR_WRITERS = (
    *("lora", "tools", "tool_choice", "response_format", "structured_outputs", "logprobs", "top_logprobs"),
    *OF_ONE_TEXT,
)

# A media part's message to the thinker, and its file.
Pending = tuple[media_pb2.Media, MediaFile]


async def to_jobs(gateway: Gateway, request: ChatCompletionRequest, request_id: str, owner: str | None) -> list[Job]:
    """One job for each answer, with the media loaded; `owner` is whose uploaded voices can speak.

    Raises:
        ApiError: 400 naming the field at fault.
    """
    config = gateway.pipeline.config
    _check(gateway, request)
    if config.thinker is None:
        _, text, _ = last_words(request, "it says what is spoken", "speaks text")
        starts, media = speech(await _say(gateway, request, text, owner)), []
    else:
        # an unknown voice is refused even if nothing is spoken
        speaker = gateway.catalog.speaker(request.voice, "audio.voice")
        start, media = await _generate(gateway, request)
        starts = {"thinker": start}
        if request.speaks:
            sampling = talker_sampling(gateway, request.quartet.talker, request.seed)
            starts |= speech(talker_pb2.SpeakStart(speaker=speaker, sampling=sampling))
    return [
        _nth(starts, media, request_id if request.n in (None, 1) else f"{request_id}-{i}", i)
        for i in range(request.n or 1)
    ]


def _nth(starts: Mapping[str, ProtoMessage], media: list[bytes], request_id: str, index: int) -> Job:
    """The job of answer `index`, which is added to the seeds."""
    # a run writes into no job: the first needs no copy, which may be megabytes of media
    copies: dict[str, Any] = {kind: deepcopy(start) if index else start for kind, start in starts.items()}
    for kind in copies.keys() & {"thinker", "talker"}:
        if copies[kind].sampling.HasField("seed"):
            copies[kind].sampling.seed += index
    if index and "thinker" in copies:  # one answer has them for all
        copies["thinker"].sampling.ClearField("prompt_logprobs")
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
    request.check()
    if request.speaks and outputs.speech is None:
        raise invalid("modalities", 'this model has no speech: use ["text"]')
    if (request.n or 1) > gateway.settings.max_choices:
        raise invalid("n", f"at most {gateway.settings.max_choices} answers a request")


def refuse_members(request: ChatCompletionRequest, members: Iterable[str], reason: str) -> None:
    """Raises ApiError: 400 naming the first of `members` that says anything."""
    for name in members:
        value = getattr(request, name)
        if value or (value == 0 and value is not False):  # 0 alternatives are log-probabilities all the same
            raise invalid(name, reason)


def last_words(
    request: ChatCompletionRequest, why: str, reads: str, others: type[conversation.MediaPart] | tuple[()] = ()
) -> tuple[str, str, list[MediaFile]]:
    """(place of its content in the request, its text, its media) of the user's last message.

    Args:
        why: what the message is for.
        reads: what the model does with which parts: "reads text and images".
        others: the parts it reads besides text.

    Raises:
        ApiError: 400, there is none, or naming the part that is not read.
    """
    users = [(i, message) for i, message in enumerate(request.messages) if isinstance(message, UserMessage)]
    if not users:
        raise invalid("messages", f"one of them must be the user's: {why}")
    index, message = users[-1]
    place, texts, media = f"messages[{index}].content", [], []
    for j, part in enumerate(message.content):
        if isinstance(part, conversation.TextPart):
            texts.append(part.text)
        elif isinstance(part, others):
            media.append(media_file(part, f"{place}[{j}]"))
        else:
            raise invalid(f"{place}[{j}]", f"this model {reads} only")
    return place, "\n".join(texts), media


def media_file(part: conversation.MediaPart, field: str) -> MediaFile:
    """The file of a part; not loaded."""
    if isinstance(part, conversation.InputAudioPart):
        return MediaFile(field, "audio", part.input_audio.url)
    return MediaFile(field, part.type.removesuffix("_url"), getattr(part, part.type).url)


async def _generate(gateway: Gateway, request: ChatCompletionRequest) -> tuple[thinker_pb2.GenerateStart, list[bytes]]:
    """(start message of the thinker, files that follow it)."""
    most = request.max_completion_tokens
    sampling = sampling_of(gateway, request, most, (request.top_logprobs or 0) if request.logprobs else None)
    start = thinker_pb2.GenerateStart(
        use_audio_in_video=request.use_audio_in_video,
        sampling=sampling,
        priority=request.priority or 0,
        lora=gateway.catalog.lora_of(request.model, request.lora),
    )
    pending = fill_messages(start, gateway, request.messages)
    fill_tools(start, request.tools, request.tool_choice)
    request.end(start)
    request.cut(start)
    start.wants_prompt_token_ids = bool(request.return_token_ids)
    if request.prompt_logprobs is not None:
        start.sampling.prompt_logprobs = request.prompt_logprobs
    if variables := request.template_variables:
        start.chat_template_kwargs_json = json.dumps(variables)
    late_media = await attach_media(gateway, pending)
    refuse_large(start, "messages")
    return start, late_media


def refuse_large(start: thinker_pb2.GenerateStart, field: str) -> None:
    """Raises ApiError: 400 naming `field`."""
    if start.ByteSize() > MAX_START_BYTES:
        raise invalid(field, "more text than a request can have", "context_length_exceeded")


async def _say(gateway: Gateway, request: ChatCompletionRequest, text: str, owner: str | None) -> talker_pb2.SpeakStart:
    """Start message of a talker without a thinker."""
    options = VoiceOptions(voice=None if request.voice is None else VoiceId(id=request.voice))
    start = (await plan_speech(gateway, options, gateway.catalog.info("talker"), owner, voice="audio.voice")).start
    start.text.text = text
    start.sampling.CopyFrom(talker_sampling(gateway, request.quartet.talker, request.seed))
    return start


def fill_messages(start: thinker_pb2.GenerateStart, gateway: Gateway, messages: Sequence[Message]) -> list[Pending]:
    """Adds the messages to `start`; returns media to attach. Raises ApiError: 400 naming what is at fault."""
    pending: list[Pending] = []
    for i, message in enumerate(messages):
        pending += _fill_message(start.messages.add(), gateway, message, f"messages[{i}]")
    return pending


def _fill_message(result: thinker_pb2.ChatMessage, gateway: Gateway, message: Message, place: str) -> list[Pending]:
    pending: list[Pending] = []
    result.role = "system" if message.role == "developer" else message.role
    result.name = getattr(message, "name", None) or ""
    for j, part in enumerate(message.content or ()):
        field = f"{place}.content[{j}]"
        if isinstance(part, conversation.TextPart):
            result.content.add(text=part.text)
        elif isinstance(part, conversation.RefusalPart):
            result.content.add(text=part.refusal)
        elif isinstance(message, conversation.AssistantMessage):
            raise invalid(field, "this model reads images in the user's messages only")
        else:
            file = media_file(part, field)
            media = media_pb2.Media(kind=f"MEDIA_KIND_{file.kind.upper()}", field=field)
            pending.append((result.content.add(media=media).media, file))
    if isinstance(message, conversation.AssistantMessage):
        if message.audio and not message.content:
            transcript = gateway.transcripts.get(message.audio.id)
            if transcript is None:
                why = "has expired, or is another gateway's; send the answer's text as content instead"
                reason = f"{message.audio.id!r} is unknown: it {why}"
                raise invalid(f"{place}.audio.id", reason)
            result.content.add(text=transcript)
        result.reasoning = message.reasoning_content or message.reasoning or ""
        for call in message.tool_calls or ():
            result.tool_calls.add(id=call.id, name=call.function.name, arguments_json=call.function.arguments)
    elif message.role == "tool":
        result.tool_call_id = message.tool_call_id
    return pending


def sampling_of(
    gateway: Gateway, request: WriterSampling, max_tokens: int | None, top_logprobs: int | None
) -> thinker_pb2.SamplingParameters:
    """The thinker's sampling: the request's over the pipeline's.

    Args:
        max_tokens: wins over the request's own.
        top_logprobs: alternatives for each token; None: no log-probabilities.
    """
    assert gateway.pipeline.config.thinker is not None, "text was requested of a pipeline without a thinker"
    values = request.over(gateway.pipeline.config.thinker.sampling)
    if max_tokens is not None:
        values["max_tokens"] = max_tokens
    message = thinker_pb2.SamplingParameters(**values, stop=request.stop, logit_bias=request.logit_bias)
    if top_logprobs is not None:
        message.top_logprobs = top_logprobs
    match request.response_format:
        case JsonObjectFormat():
            message.json_object = True
        case JsonSchemaFormat(json_schema=schema):
            message.json_schema = json.dumps(schema.json_schema, ensure_ascii=False)
        case StructuralTagFormat() as tag:
            tag.fill(message)
    request.fill(message)
    return message


def talker_sampling(gateway: Gateway, requested: TalkerSampling, seed: int | None) -> talker_pb2.TalkerSampling:
    """The talker's sampling: the request's over the pipeline's. `seed` counts where `requested` has none."""
    assert gateway.pipeline.config.talker is not None, "speech was requested of a pipeline without a talker"
    sampling = talker_pb2.TalkerSampling(**requested.over(gateway.pipeline.config.talker.sampling))
    if not sampling.HasField("seed") and seed is not None:
        sampling.seed = seed
    return sampling


def fill_tools(start: thinker_pb2.GenerateStart, tools: Sequence[AnyTool] | None, choice: ToolChoice | None) -> None:
    """Raises ApiError: 400, a tool is no function."""
    for i, tool in enumerate(tools or ()):
        if not isinstance(tool, Tool):
            raise invalid(f"tools[{i}].type", "Input should be 'function'")
        function = tool.function
        parameters = "" if function.parameters is None else json.dumps(function.parameters, ensure_ascii=False)
        start.tools.add(name=function.name, description=function.description or "", parameters_json=parameters)
    if choice:
        name = choice.function.name if choice.function else ""
        start.tool_choice.CopyFrom(thinker_pb2.ToolChoice(mode=f"MODE_{choice.type.upper()}", name=name))


async def attach_media(gateway: Gateway, pending: list[Pending]) -> list[bytes]:
    """Loads the files and puts them into their messages; returns those that follow in chunks. Raises ApiError."""
    await load_media(gateway.fetcher, [file for _, file in pending])
    return attach([(message, file.content) for message, file in pending])


def attach(media: Sequence[tuple[media_pb2.Media, bytes]]) -> list[bytes]:
    """Puts files into their messages; returns those that have to follow in chunks."""
    late, inline_bytes = [], 0
    for message, content in media:
        if inline_bytes + len(content) <= MAX_INLINE_BYTES:
            message.data = content
            inline_bytes += len(content)
        else:
            message.size_bytes = len(content)
            late.append(content)
    return late
