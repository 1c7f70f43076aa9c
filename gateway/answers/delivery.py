"""How a text is to be spoken: in whose voice, in which language; what of it the talker cannot do is refused."""

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import structlog
from pydantic import BeforeValidator, Field

from gateway.answers.gateway import Gateway
from gateway.errors import ApiError, invalid
from gateway.media.fetch import MediaError, decode_base64
from gateway.media.voice_sample import MAX_BYTES, from_flac, read_sample
from gateway.store import StoreError
from gateway.validation import Strict
from quartet.v1 import server_info_pb2, talker_pb2, tensor_pb2
from services.common.text import match_case

Task = Literal["CustomVoice", "VoiceDesign", "Base"]
MAX_SAID_CHARACTERS = 2000  # of what is said in 30 s
_TOLD_VOICES = 50  # that an error lists

log = structlog.get_logger()


class VoiceId(Strict):
    """A voice by its id, or its name."""

    id: str


def _as_voice(voice: Any) -> Any:
    return {"id": voice} if isinstance(voice, str) else voice


class Delivery(Strict):
    """How a text is to be spoken: OpenAI's members, and those that other servers of speech have."""

    voice: Annotated[VoiceId, BeforeValidator(_as_voice)] | None = Field(
        default=None,
        description="one of the model's, in any case, or an uploaded one by name or id, or {id}; default: its first",
    )
    instructions: str | None = Field(default=None, description="how to speak, or who speaks; as the model takes it")
    language: str | None = Field(default=None, description="one of the model's, in any case; auto, the default")
    task_type: Task | None = Field(default=None, description="checked: what the model does is its own")
    non_streaming_mode: bool | None = Field(
        default=None, description="whether the model reads all of the text before it speaks; default: the model's"
    )
    ref_audio: str | None = Field(
        default=None, description="a sample of a voice to imitate: base64 or a data, https or http URL; 1 to 30 s"
    )
    ref_text: str | None = Field(default=None, max_length=MAX_SAID_CHARACTERS, description="what is said in ref_audio")
    x_vector_only_mode: bool | None = Field(
        default=None, description="whether what is said in the sample is left aside; default: where it is not known"
    )


@dataclass
class Delivered:
    """A delivery as the talker takes it.

    Attributes:
        start: voice, language and instructions; sampling and text are still to come.
        sample_s: seconds of the voice sample; 0: there is none.
        names: what the request calls fields of `start.text`, where it has other names.
        log: fields for the request's log line.
    """

    start: talker_pb2.SpeakStart
    sample_s: float = 0.0
    names: dict[str, str] = field(default_factory=lambda: {"whole_text_first": "non_streaming_mode"})
    log: dict[str, Any] = field(default_factory=dict)

    def imitate(self, samples: np.ndarray, rate_hz: int, text: str, names: tuple[str, str]) -> None:
        """Has it spoken in the voice of a sample (samples,) float32, in which `text` is said; "": that is not known.
        `names` are those of sample and text in the request."""
        sample = self.start.text.voice_sample
        sample.samples.dtype = tensor_pb2.DATA_TYPE_FLOAT32
        sample.samples.shape.append(len(samples))
        sample.samples.inline = samples.astype("<f4").tobytes()
        sample.text = text
        self.sample_s = len(samples) / rate_hz
        self.names |= {"voice_sample": names[0], "voice_sample.samples": names[0], "voice_sample.text": names[1]}
        self.log["voice_sample_s"] = round(self.sample_s, 2)


async def deliver(
    gateway: Gateway,
    asked: Delivery,
    talker: server_info_pb2.TalkerInfo,
    owner: str | None,
    voice: str = "voice",
) -> Delivered:
    """`asked` as `talker` takes it, with uploaded voices of `owner` beside its own. `voice` is what the request calls
    that member. Raises ApiError: it cannot speak so.
    """
    _check_task(asked.task_type, talker)
    if asked.instructions and not talker.takes_instructions:
        raise invalid("instructions", "this model takes none; leave them out")
    text = talker_pb2.SpokenText(
        instructions=asked.instructions,
        language=_language(asked.language, talker),
        whole_text_first=asked.non_streaming_mode,
    )
    delivered = Delivered(talker_pb2.SpeakStart(text=text))
    if asked.ref_audio is not None:  # OpenAI's clients must send a voice as well: it is not read
        await _imitate_given(gateway, asked, talker, delivered)
    elif asked.ref_text:
        raise invalid("ref_text", "only with ref_audio, the sample that it is said in")
    elif (speaker := _own_voice(asked, talker, voice)) is None:
        await _imitate_uploaded(gateway, asked, talker, delivered, owner, voice)
    elif asked.x_vector_only_mode is not None:
        raise invalid("x_vector_only_mode", "only with a voice sample: ref_audio, or an uploaded voice")
    else:
        delivered.start.speaker = speaker
    return delivered


def _check_task(task: Task | None, talker: server_info_pb2.TalkerInfo) -> None:
    able = {"CustomVoice": bool(talker.speakers), "Base": talker.voice_sample_rate_hz > 0}
    able["VoiceDesign"] = not any(able.values())
    if task is not None and not able[task]:
        can = " and ".join(name for name, is_able in able.items() if is_able)
        raise invalid("task_type", f"this model does {can}")


def _language(language: str | None, talker: server_info_pb2.TalkerInfo) -> str:
    """The language as the talker spells it; "": it hears it from the text. Raises ApiError."""
    if language is None or language.lower() == "auto":
        return ""
    if not talker.languages:
        raise invalid("language", "this model hears it from the text; leave it out, or send auto")
    match = match_case(language, talker.languages)
    if match is None:
        raise invalid("language", f"no language {language!r}; use auto or one of {', '.join(talker.languages)}")
    return match


async def _imitate_given(
    gateway: Gateway, asked: Delivery, talker: server_info_pb2.TalkerInfo, delivered: Delivered
) -> None:
    rate_hz = talker.voice_sample_rate_hz
    if not rate_hz:
        raise invalid("ref_audio", "this model imitates no voices; leave it out")
    if asked.x_vector_only_mode is False and not asked.ref_text:
        reason = "required: what is said in ref_audio; or send x_vector_only_mode true, and the voice alone is taken"
        raise invalid("ref_text", reason, "missing_required_parameter")
    assert asked.ref_audio is not None
    try:
        if asked.ref_audio.partition(":")[0].lower() in ("data", "http", "https"):
            content = await gateway.fetcher.get(asked.ref_audio, "audio")
        else:
            content = await asyncio.to_thread(decode_base64, asked.ref_audio, MAX_BYTES)
        samples = await asyncio.to_thread(read_sample, content, rate_hz)
    except MediaError as error:
        raise invalid("ref_audio", str(error), "invalid_media") from None
    text = "" if asked.x_vector_only_mode else asked.ref_text or ""
    delivered.imitate(samples, rate_hz, text, ("ref_audio", "ref_text"))


def _own_voice(asked: Delivery, talker: server_info_pb2.TalkerInfo, param: str) -> str | None:
    """The talker's own voice of that name, as it spells it; "": its default, or that which instructions describe; None:
    it is none of these. Raises ApiError: there is no voice to speak with."""
    if asked.voice is not None and not talker.speakers and not talker.voice_sample_rate_hz:
        raise invalid(param, "this model has no voices; leave it out and say in instructions who speaks")
    if asked.voice is not None:
        return match_case(asked.voice.id, talker.speakers)
    if talker.voice_sample_rate_hz and not talker.speakers:
        sample = "Send ref_audio, a sample of it, or upload one" if param == "voice" else "Upload a sample of it"
        reason = f"required: this model has no voices of its own, it imitates one. {sample}"
        reason += " by POST /v1/audio/voices (quartet voice add) and send its name"
        raise invalid(param, reason, "missing_required_parameter")
    return ""


async def _imitate_uploaded(
    gateway: Gateway,
    asked: Delivery,
    talker: server_info_pb2.TalkerInfo,
    delivered: Delivered,
    owner: str | None,
    param: str,
) -> None:
    assert asked.voice is not None
    rate_hz, voices = talker.voice_sample_rate_hz, list(talker.speakers)
    if rate_hz:
        with storing():
            voice = await gateway.voices.find(asked.voice.id, owner)
            flac = None if voice is None else await gateway.voices.sample(voice)
            voices += [known.name for known in await gateway.voices.all_of(owner)] if flac is None else []
        if voice is not None and flac is not None:
            if asked.x_vector_only_mode is False and not voice.text:
                reason = f"what is said in the sample of {voice.name!r} is not known; leave this out"
                raise invalid("x_vector_only_mode", reason)
            samples = await asyncio.to_thread(from_flac, flac, rate_hz)
            delivered.imitate(samples, rate_hz, "" if asked.x_vector_only_mode else voice.text, (param, param))
            delivered.log["voice"] = voice.id
            return
    more = ", ..." if len(voices) > _TOLD_VOICES else ""
    known = (
        f"use one of {', '.join(voices[:_TOLD_VOICES])}{more}" if voices else "none has been uploaded to this gateway"
    )
    how = "; or upload one by POST /v1/audio/voices, or send ref_audio" if rate_hz else ""
    raise invalid(param, f"no voice {asked.voice.id!r}; {known}{how}")


@contextmanager
def storing() -> Iterator[None]:
    """Tells of a directory of voices that cannot be used. Raises ApiError: 500."""
    try:
        yield
    except (StoreError, sqlite3.Error) as error:
        log.error("uploaded voices cannot be read or written", error=str(error))
        message = "uploaded voices cannot be read or written now; the gateway's log says why"
        raise ApiError(500, message, None, "storage_failed") from error
