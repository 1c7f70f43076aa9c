"""What a request says: GenerateStart as a Conversation, SamplingParameters as vLLM's SamplingParams."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quartet.v1 import media_pb2, thinker_pb2
from services.common import sampling_limits
from services.common.errors import InvalidInput, TooManyMedia, require
from services.common.text import ROLE_NAME
from services.thinker.architectures import TRANSCRIBES
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import (
    ROLES,
    Conversation,
    Cut,
    FrameChoice,
    MediaFile,
    MediaKind,
    Message,
    RawPrompt,
    SpokenInput,
    check_token_ids,
)
from services.thinker.structure import Format, forced_schema, read_object, structure_of

if TYPE_CHECKING:
    from vllm import SamplingParams

MAX_STOP_STRINGS = 16
# vLLM's workers on GPUs raise at more than 1,024, at 128 ids that end an answer (the checkpoint's own included).
_MOST_IDS = {
    "allowed_token_ids": 1024,
    "logit_bias": 1024,
    "stop_token_ids": 120,
    "logprob_token_ids": sampling_limits.MAX_LOGPROB_TOKEN_IDS,
}
# They raise at 1,024 tokens of these, too: each word has at most one a byte, with and without a blank before it.
MAX_BAD_WORDS = 64
MAX_BAD_WORD_BYTES = 448
MOST_TOOL_BYTES = 1024 * 1024  # parameters of all tools
MAX_FRAMES_PER_S = 1000
MAX_TOP_LOGPROBS = int(sampling_limits.TOP_LOGPROBS.most)

_LONGEST = 2**31 - 1
_RANGES = {
    "temperature": sampling_limits.TEMPERATURE,
    "top_p": sampling_limits.TOP_P,
    "min_p": sampling_limits.MIN_P,
    "presence_penalty": sampling_limits.PENALTY,
    "frequency_penalty": sampling_limits.PENALTY,
    "repetition_penalty": sampling_limits.REPETITION_PENALTY,
    "top_k": sampling_limits.Range(-1, _LONGEST),
    "max_tokens": sampling_limits.Range(1, _LONGEST),
    "min_tokens": sampling_limits.Range(0, _LONGEST),
    "thinking_token_budget": sampling_limits.Range(0, _LONGEST),
    "top_logprobs": sampling_limits.TOP_LOGPROBS,
    "prompt_logprobs": sampling_limits.TOP_LOGPROBS,
}
_SWITCHES = (
    *("ignore_eos", "include_stop_str_in_output"),
    *("skip_special_tokens", "spaces_between_special_tokens"),
)
_MOST_HINTS = 4096  # characters: they are tokenized at once
_KINDS: dict[int, MediaKind] = {
    media_pb2.MEDIA_KIND_IMAGE: "image",
    media_pb2.MEDIA_KIND_AUDIO: "audio",
    media_pb2.MEDIA_KIND_VIDEO: "video",
}


def read_conversation(
    start: thinker_pb2.GenerateStart, tools: list[dict[str, Any]], limits: ThinkerSettings
) -> Conversation:
    """The conversation about `tools`. Media that are not in `start` have `missing_bytes`.

    Raises InvalidInput, which names the field.
    """
    if start.HasField("transcription"):
        conversation = Conversation([], spoken=_spoken(start.transcription))
        _check_media(conversation.media, limits)
        return conversation
    raw = _raw(start) if start.HasField("prompt") else None
    require(raw or start.messages, "messages", "must not be empty")
    messages = [_message(f"messages[{i}]", message) for i, message in enumerate(start.messages)]
    template_kwargs = read_object("chat_template_kwargs_json", start.chat_template_kwargs_json or "{}")
    if "chat_template" in template_kwargs:  # a template is a program, and nothing limits the time it takes
        raise InvalidInput("chat_template_kwargs_json", "may set the template's variables, not the template")
    continues = start.continue_final_message
    asks = not (start.no_generation_prompt or continues)
    hears = start.use_audio_in_video
    limits_of_prompt = _cut(start), _frames(start)
    conversation = Conversation(messages, tools, hears, template_kwargs, raw, asks, continues, *limits_of_prompt)
    _check_media(conversation.media, limits)
    if conversation.continues:
        _check_continued(messages[-1], f"messages[{len(messages) - 1}]")
    if conversation.cut and conversation.media:
        raise InvalidInput("truncate_prompt_tokens", "cannot be beside media, which are not cut; leave it out")
    return conversation


def refuse_transcription(start: thinker_pb2.GenerateStart, transcribes: bool, only: bool) -> None:
    """Raises InvalidInput: the model `only` transcribes and is asked for an answer, or has no prompts for it."""
    field = "prompt" if start.HasField("prompt") else "messages"
    if not start.HasField("transcription"):
        reason = f"this model {TRANSCRIBES}; send a sound to /v1/audio/transcriptions"
        require(not only, field, reason)
        return
    require(transcribes, "transcription", "this model answers messages: send the sound in one, and what to do with it")
    for name in ("messages", "tools", "output_stream_id", "chat_template_kwargs_json", "use_audio_in_video"):
        require(not getattr(start, name), name, "cannot be beside a transcription; leave it out")
    for name in ("prompt", "truncate_prompt_tokens", *(("beams",) if only else ())):
        require(not start.HasField(name), name, "cannot be beside a transcription; leave it out")


def _spoken(asked: thinker_pb2.Transcription) -> SpokenInput:
    file = _file("transcription.sound", asked.sound)
    require(file.kind == "audio", file.field, "must be of kind audio")
    reason = f"has {len(asked.hints)} characters; at most {_MOST_HINTS} are read"
    require(len(asked.hints) <= _MOST_HINTS, "transcription.hints", reason)
    return SpokenInput(file, asked.language, asked.translates, asked.to_language, asked.hints)


def _cut(start: thinker_pb2.GenerateStart) -> Cut | None:
    if not start.HasField("truncate_prompt_tokens"):
        return None
    most, side = start.truncate_prompt_tokens, start.truncation_side
    require(most == -1 or most > 0, "truncate_prompt_tokens", f"must be -1, or 1 or more, not {most}")
    return Cut(most, side == thinker_pb2.TRUNCATION_SIDE_LEFT if side else None)


def _frames(start: thinker_pb2.GenerateStart) -> FrameChoice | None:
    if not start.HasField("video_frames"):
        return None
    frames = start.video_frames
    count = frames.count if frames.HasField("count") else None
    per_s = frames.per_s if frames.HasField("per_s") else None
    require(count is None or count > 0, "video_frames.count", f"must be 1 or more, not {count}")
    require(per_s is None or 0 < per_s <= MAX_FRAMES_PER_S, "video_frames.per_s", f"must be 0 to {MAX_FRAMES_PER_S}")
    return FrameChoice(count, per_s)


def _check_continued(last: Message, field: str) -> None:
    """Raises InvalidInput: an answer cannot go on with `last`."""
    ends_in_text = last.parts and isinstance(last.parts[-1], str) and last.parts[-1].strip()
    require(ends_in_text, f"{field}.content", "must end in a text to be continued; leave out continue_final_message")
    for name in ("tool_calls", "token_ids"):
        require(not getattr(last, name), f"{field}.{name}", "cannot be in a message that is continued; leave them out")


def _raw(start: thinker_pb2.GenerateStart) -> RawPrompt:
    prompt = start.prompt
    template = ("messages", "tools", "chat_template_kwargs_json", "continue_final_message", "no_generation_prompt")
    for name in template:
        require(not getattr(start, name), name, "cannot be beside a prompt: no chat template is applied")
    require(prompt.text or prompt.token_ids.ids, "prompt", "must have a text or token ids")
    files = [_file(f"prompt.media[{i}]", media) for i, media in enumerate(prompt.media)]
    return RawPrompt(prompt.text, list(prompt.token_ids.ids), files, prompt.opens_thought)


def read_tools(start: thinker_pb2.GenerateStart) -> tuple[list[dict[str, Any]], str | None]:
    """The tools that may be called, as chat templates take them; and the JSON schema that the answer must fit, if any.

    Raises InvalidInput, which names the field.
    """
    mode = start.tool_choice.mode
    require(mode in thinker_pb2.ToolChoice.Mode.values(), "tool_choice.mode", f"{mode} is not a mode")
    tools, left = [], MOST_TOOL_BYTES
    for i, tool in enumerate(start.tools):
        require(tool.name, f"tools[{i}].name", "is required")
        left -= len(tool.parameters_json)
        require(left >= 0, f"tools[{i}].parameters_json", f"makes all tools' larger than {MOST_TOOL_BYTES} bytes")
        described = {"description": tool.description} if tool.description else {}
        parameters = read_object(f"tools[{i}].parameters_json", tool.parameters_json or "{}")
        tools.append({"type": "function", "function": {"name": tool.name, **described, "parameters": parameters}})
    schema = forced_schema(mode, start.tool_choice.name, tools)
    return tools if mode != thinker_pb2.ToolChoice.MODE_NONE else [], schema


def _check_media(files: list[MediaFile], limits: ThinkerSettings) -> None:
    """Refuses too much before the rest of it is read."""
    most = {"image": limits.max_images, "audio": limits.max_audios, "video": limits.max_videos}
    counts: Counter[MediaKind] = Counter()
    size_bytes = 0
    for file in files:
        field, kind = file.field, file.kind
        counts[kind] += 1
        if counts[kind] > most[kind]:
            raise TooManyMedia(field, f"is one {kind} too many; at most {most[kind]} are taken")
        size_bytes += len(file.data) or file.missing_bytes
        if size_bytes > limits.max_media_bytes:
            raise InvalidInput(field, f"makes the media larger than the {limits.max_media_bytes} bytes that are taken")


def _message(field: str, message: thinker_pb2.ChatMessage) -> Message:
    reason = f"must be one of {', '.join(ROLES)}, or up to 64 letters, digits, _, . and -, not '{message.role}'"
    require(message.role in ROLES or re.fullmatch(ROLE_NAME, message.role), f"{field}.role", reason)
    if message.token_ids and message.role != "assistant":
        raise InvalidInput(f"{field}.token_ids", f"only the assistant's messages have them, not role '{message.role}'")
    parts = [_part(f"{field}.content[{i}]", part) for i, part in enumerate(message.content)]
    calls = []
    for i, call in enumerate(message.tool_calls):
        arguments = _arguments(f"{field}.tool_calls[{i}].arguments_json", call.arguments_json)
        calls.append({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}})
    if message.token_ids and not all(isinstance(part, str) for part in parts):
        raise InvalidInput(f"{field}.token_ids", "cannot stand for media; leave the ids out, or the media")
    if message.reasoning and message.role != "assistant":
        raise InvalidInput(f"{field}.reasoning", f"only the assistant's messages have it, not role '{message.role}'")
    ids, reasoning = list(message.token_ids), message.reasoning
    return Message(message.role, parts, calls, message.tool_call_id, message.name, ids, reasoning)


def _arguments(field: str, text: str) -> dict[str, Any] | str:
    """Of an earlier call: an object, or the text of a call that was cut off. No arguments are "" and, in PHP, [].

    Raises InvalidInput: JSON, but no object.
    """
    try:
        is_none = not text or json.loads(text) in ([], None)
    except (ValueError, RecursionError):
        return text
    return {} if is_none else read_object(field, text)


def _part(field: str, part: thinker_pb2.ContentPart) -> str | MediaFile:
    kind = part.WhichOneof("content")
    if kind == "text":
        return part.text
    if kind is None:
        raise InvalidInput(field, "must have text or media")
    return _file(field, part.media)


def _file(field: str, media: media_pb2.Media) -> MediaFile:
    field, kind = media.field or field, _KINDS.get(media.kind)
    if kind is None:
        raise InvalidInput(field, "must state its kind: image, audio or video")
    require(media.data or media.size_bytes, field, "is empty")
    return MediaFile(kind, media.data, field, 0 if media.data else media.size_bytes)


def sampling_params(
    request: thinker_pb2.SamplingParameters,
    defaults: Mapping[str, Any],
    vocab_size: int,
    forced: str | None = None,
    calls: Format | None = None,
) -> "SamplingParams":
    """vLLM's parameters for `request`.

    Args:
        defaults: the checkpoint's generation_config, by vLLM's names.
        forced, calls: see `structure_of`.

    Raises:
        InvalidInput: names the field, e.g. "sampling.top_p".
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    _check_sampling(request, vocab_size)
    values: dict[str, Any] = {"max_tokens": None, **defaults}
    named_alike = [*(name for name in _RANGES if name != "top_logprobs"), *_SWITCHES]
    values |= {name: getattr(request, name) for name in named_alike if request.HasField(name)}
    chosen = list(dict.fromkeys(request.logprob_token_ids)) or None
    return SamplingParams(
        **values,
        seed=request.seed % 2**63 if request.HasField("seed") else None,  # vLLM takes -1 for "no seed"
        logprobs=request.top_logprobs if request.HasField("top_logprobs") and not chosen else None,
        logprob_token_ids=chosen,
        logit_bias=dict(request.logit_bias) or None,
        stop=list(request.stop),
        stop_token_ids=list(request.stop_token_ids),
        allowed_token_ids=list(request.allowed_token_ids) or None,
        bad_words=list(request.bad_words),
        structured_outputs=structure_of(request, forced, calls),
        output_kind=RequestOutputKind.DELTA,
    )


def _check_sampling(request: thinker_pb2.SamplingParameters, vocab_size: int) -> None:
    for name, limit in _RANGES.items():
        if not request.HasField(name):  # pyright: ignore[reportArgumentType]
            continue
        value = getattr(request, name)
        is_whole = limit is sampling_limits.TOP_LOGPROBS and value == sampling_limits.WHOLE_VOCABULARY
        require(value in limit or is_whole, f"sampling.{name}", f"must be {limit}, not {value:g}")
    if request.HasField("max_tokens") and request.min_tokens > request.max_tokens:
        raise InvalidInput("sampling.min_tokens", f"must be at most max_tokens, {request.max_tokens}")
    if len(request.stop) > MAX_STOP_STRINGS:
        raise InvalidInput("sampling.stop", f"has {len(request.stop)} strings; at most {MAX_STOP_STRINGS} are taken")
    if request.logprob_token_ids and not request.HasField("top_logprobs"):
        raise InvalidInput("sampling.logprob_token_ids", "only with log-probabilities")
    require(all(request.stop), "sampling.stop", "must not contain an empty string")
    for name, most in _MOST_IDS.items():
        token_ids = getattr(request, name)
        check_token_ids(f"sampling.{name}", token_ids, vocab_size)
        require(len(token_ids) <= most, f"sampling.{name}", f"has {len(token_ids)} tokens; at most {most} are taken")
    require(all(map(str.strip, request.bad_words)), "sampling.bad_words", "must not contain a blank word")
    size_bytes = sum(len(word.encode()) for word in request.bad_words)
    if len(request.bad_words) > MAX_BAD_WORDS or size_bytes > MAX_BAD_WORD_BYTES:
        reason = f"at most {MAX_BAD_WORDS} words of {MAX_BAD_WORD_BYTES} bytes together are taken"
        raise InvalidInput("sampling.bad_words", reason)
    for token_id, bias in request.logit_bias.items():
        if not -100 <= bias <= 100:
            raise InvalidInput("sampling.logit_bias", f"of token {token_id} must be -100 to 100, not {bias:g}")
