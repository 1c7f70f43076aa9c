"""Makes jobs for the pipeline of a chat request."""

import json
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from typing import Any

from gateway.answers import conversation
from gateway.answers.answer_speech import AnswerSpeech, answer_speech, plan_voice
from gateway.answers.conversation import UserMessage
from gateway.answers.extensions import OF_ONE_TEXT
from gateway.answers.gateway import Gateway
from gateway.answers.prompt_messages import Pending, attach_media, fill_messages, fill_tools, media_file, refuse_large
from gateway.answers.request import ChatCompletionRequest
from gateway.answers.sampling import sampling_of, talker_sampling
from gateway.errors import invalid
from gateway.media.check import MediaFile
from gateway.pipeline.run import Job, speech
from quartet.v1 import talker_pb2, thinker_pb2

# Members that say how text is written; those that say how it is sampled are not read where none is.
_FOR_WRITERS = (
    *("lora", "tools", "tool_choice", "response_format", "structured_outputs", "logprobs", "top_logprobs"),
    *OF_ONE_TEXT,
)


async def to_jobs(gateway: Gateway, request: ChatCompletionRequest, request_id: str, owner: str | None) -> list[Job]:
    """One job for each answer, with the media loaded; `owner` is whose uploaded voices can speak.

    Raises:
        ApiError: 400 naming the field at fault.
    """
    config = gateway.pipeline.config
    _check(gateway, request)
    if config.thinker is None:
        _, text, _ = last_words(request, "it says what is spoken", "speaks text")
        starts, media, most_bytes = speech(await _say(gateway, request, text, owner)), [], 0
    else:
        spoken = await _speech(gateway, request, owner)
        start, media = await _generate(gateway, request, request_id, owner)
        starts = {"thinker": start, **spoken.starts}
        most_bytes = spoken.utterance_bytes
    count = 1 if request.use_beam_search else request.n or 1
    first = Job(request_id, starts, media, utterance_bytes=most_bytes)
    return [_nth(first, i, request_id if count == 1 else f"{request_id}-{i}") for i in range(count)]


async def _speech(gateway: Gateway, request: ChatCompletionRequest, owner: str | None) -> AnswerSpeech:
    """How the answers are spoken, if they are. An unknown voice is refused even if nothing is. Raises ApiError."""
    if not request.speaks:
        gateway.catalog.speaker(request.voice, "audio.voice")
        return AnswerSpeech({})
    sampling = talker_sampling(gateway, request.quartet.talker, request.seed)
    return await answer_speech(gateway, request.voice, sampling, owner, "audio.voice")


def _nth(job: Job, index: int, request_id: str) -> Job:
    """The job of answer `index`, which is added to the seeds."""
    # a run writes into no job: the first needs no copy, which may be megabytes of media
    copies: dict[str, Any] = {kind: deepcopy(start) if index else start for kind, start in job.starts.items()}
    for kind in copies.keys() & {"thinker", "talker"}:
        if copies[kind].sampling.HasField("seed"):
            copies[kind].sampling.seed += index
    if index and "thinker" in copies:  # one answer has them for all
        copies["thinker"].sampling.ClearField("prompt_logprobs")
    return replace(job, request_id=request_id, starts=copies)


def _check(gateway: Gateway, request: ChatCompletionRequest) -> None:
    """Raises ApiError: 400, the request contradicts itself, or this server cannot answer it so."""
    outputs, modalities = gateway.pipeline.config.outputs, request.modalities
    if "image" in (modalities or ()) or request.quartet.dit is not None:
        raise invalid("modalities" if request.quartet.dit is None else "quartet.dit", _no_images(gateway))
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


def _no_images(gateway: Gateway) -> str:
    stage = gateway.pipeline.output("image")
    other = stage and gateway.catalog.model_of(stage)
    return f"this model makes no images{f'; {other!r} does' if other else ''}"


def refuse_members(request: ChatCompletionRequest, members: Iterable[str], reason: str) -> None:
    """Raises ApiError: 400 naming the first of `members` that says anything."""
    for name in members:
        value = getattr(request, name)
        if value or (value == 0 and value is not False):  # 0 alternatives are log-probabilities all the same
            raise invalid(name, reason)


def last_words(
    request: ChatCompletionRequest,
    why: str,
    reads: str,
    others: type[conversation.MediaPart] | tuple[()] = (),
    owner: str | None = None,
) -> tuple[str, str, list[MediaFile]]:
    """(place of its content in the request, its text, its media) of the user's last message.

    Args:
        why: what the message is for.
        reads: what the model does with which parts: "reads text and images".
        others: the parts it reads besides text.
        owner: whose media they are.

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
            media.append(media_file(part, f"{place}[{j}]", owner))
        else:
            raise invalid(f"{place}[{j}]", f"this model {reads} only")
    return place, "\n".join(texts), media


async def _generate(
    gateway: Gateway, request: ChatCompletionRequest, request_id: str, owner: str | None
) -> tuple[thinker_pb2.GenerateStart, list[bytes]]:
    """(start message of the thinker, files that follow it)."""
    most = request.max_completion_tokens
    sampling = sampling_of(gateway, request, most, (request.top_logprobs or 0) if request.logprobs else None)
    start = thinker_pb2.GenerateStart(
        use_audio_in_video=request.use_audio_in_video,
        sampling=sampling,
        priority=request.priority or 0,
        lora=gateway.catalog.lora_of(request.model, request.lora),
    )
    await gateway.transcripts.load(request.messages)
    pending = _fill_prompt(start, gateway, request, owner)
    request.cut(start)
    request.choose_frames(start)
    request.search(start, request.n or 1)
    request.tell(start)
    late_media = await attach_media(gateway, pending, request_id, owner)
    refuse_large(start, "messages")
    return start, late_media


def _fill_prompt(
    start: thinker_pb2.GenerateStart, gateway: Gateway, request: ChatCompletionRequest, owner: str | None
) -> list[Pending]:
    """Returns media to attach. Raises ApiError: 400 naming what is at fault."""
    if request.prompt_ids:
        start.prompt.token_ids.ids.extend(request.prompt_ids)
        return []
    pending = fill_messages(start, gateway, request.messages, owner, request.model)
    fill_tools(start, request.tools, request.tool_choice)
    request.end(start)
    if variables := request.template_variables:
        start.chat_template_kwargs_json = json.dumps(variables)
    return pending


async def _say(gateway: Gateway, request: ChatCompletionRequest, text: str, owner: str | None) -> talker_pb2.SpeakStart:
    """Start message of a talker without a thinker."""
    sampling = talker_sampling(gateway, request.quartet.talker, request.seed)
    start = (await plan_voice(gateway, request.voice, sampling, owner, "audio.voice")).start
    start.text.text = text
    return start
