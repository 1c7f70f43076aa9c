"""Voice, language and manner of speech; refuses what the talker cannot do."""

import asyncio
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from gateway.answers.gateway import Gateway
from gateway.answers.names import is_openai_voice, own_voice
from gateway.errors import ApiError, invalid
from gateway.media.fetch import media_errors
from gateway.media.voice_sample import MAX_BYTES, from_flac, read_sample
from gateway.validation import Strict
from quartet.v1 import talker_pb2, tensor_pb2
from quartet.v1.server_info_pb2 import Code2WavInfo, TalkerInfo
from services.common.text import match_case

Task = Literal["CustomVoice", "VoiceDesign", "Base"]
MAX_SAMPLE_TEXT_CHARACTERS = 2000  # more than anyone says in 30 s
_MAX_LISTED_VOICES = 50  # in an error
# Slow speech has some 10 English letters, or 3 Chinese characters, a second.
_SLOW_S_PER_BYTE = 0.12


class VoiceId(Strict):
    id: str


def _as_voice(voice: Any) -> Any:
    if not isinstance(voice, str | dict | VoiceId):
        raise ValueError("must be the name or id of a voice, or an object with its id")
    return {"id": voice} if isinstance(voice, str) else voice


class VoiceOptions(Strict):
    """How a text is to be spoken: members of OpenAI's API and of other speech servers."""

    voice: Annotated[VoiceId, BeforeValidator(_as_voice)] | None = Field(
        default=None,
        description="one of the model's, in any case, or an uploaded one by name or id, or {id}; default: its first",
    )
    instructions: str | None = Field(default=None, description="how to speak, or who speaks; as the model takes it")
    language: str | None = Field(default=None, description="one of the model's, in any case; auto, the default")
    task_type: Task | None = Field(default=None, description="checked: what the model does is its own")
    non_streaming_mode: bool | None = Field(default=None, description="wait for all of the text; default: the model's")
    ref_audio: str | None = Field(
        default=None, description="a sample of a voice to imitate: base64 or a data, https or http URL; 1 to 30 s"
    )
    ref_text: str | None = Field(default=None, max_length=MAX_SAMPLE_TEXT_CHARACTERS, description="what ref_audio says")
    x_vector_only_mode: bool | None = Field(default=None, description="ignore the sample's text; default: if unknown")


@dataclass
class SpeakPlan:
    """Voice options as the talker takes them.

    Attributes:
        start: without sampling and text.
        voice: the talker's own, or an uploaded one's id; "": a described one, or that of a sample.
        sample_s: length of the voice sample; 0: none.
        names: the request's names of fields of `start.text`.
        log: fields for the request's log line.
    """

    start: talker_pb2.SpeakStart
    voice: str = ""
    sample_s: float = 0.0
    names: dict[str, str] = field(default_factory=lambda: {"whole_text_first": "non_streaming_mode"})
    log: dict[str, Any] = field(default_factory=dict)

    def imitate(self, samples: np.ndarray, rate_hz: int, text: str, names: tuple[str, str]) -> None:
        """Adds a sample of (n,) float32, and its text, "" if unknown; `names` are the request's for both."""
        sample = self.start.text.voice_sample
        sample.samples.dtype = tensor_pb2.DATA_TYPE_FLOAT32
        sample.samples.shape.append(len(samples))
        sample.samples.inline = samples.astype("<f4").tobytes()
        sample.text = text
        self.sample_s = len(samples) / rate_hz
        self.names |= {"voice_sample": names[0], "voice_sample.samples": names[0], "voice_sample.text": names[1]}
        self.log["voice_sample_s"] = round(self.sample_s, 2)

    def most_bytes(self, talker: TalkerInfo, code2wav: Code2WavInfo) -> int:
        """UTF-8 bytes of a text whose slowest speech fits into the talker's positions and frames. Raises ApiError: 400,
        no room is left.
        """
        text, frames_per_second = self.start.text, code2wav.sample_rate_hz / code2wav.samples_per_frame
        frames_per_byte = _SLOW_S_PER_BYTE * frames_per_second
        sample_text = self.names.get("voice_sample.text", "ref_text")
        before = {"instructions": len(text.instructions.encode()), sample_text: len(text.voice_sample.text.encode())}
        left = talker.max_context_positions - self.sample_s * frames_per_second - sum(before.values())
        by_positions = left / (frames_per_byte + 1)  # a byte is a token at most
        if by_positions < 1 and any(before.values()):
            longest = max(before, key=lambda name: before[name])
            raise invalid(longest, "is too long: no room is left for what is to be said")
        by_frames = talker.max_frames / frames_per_byte if talker.max_frames else by_positions
        return max(1, int(min(by_positions, by_frames)))


async def plan_speech(
    gateway: Gateway, options: VoiceOptions, talker: TalkerInfo, owner: str | None, voice: str = "voice"
) -> SpeakPlan:
    """Plans speech by `talker` with its own voices and `owner`'s uploaded ones. Raises ApiError.

    `voice` is that member's name in the request.
    """
    _check_task(options.task_type, talker)
    if options.instructions and not talker.takes_instructions:
        raise invalid("instructions", "this model takes none; leave them out")
    text = talker_pb2.SpokenText(
        instructions=options.instructions,
        language=_language(options.language, talker),
        whole_text_first=options.non_streaming_mode,
    )
    plan = SpeakPlan(talker_pb2.SpeakStart(text=text))
    if options.ref_audio is not None:  # OpenAI's clients must send a voice as well; it is ignored
        await _imitate_ref_audio(gateway, options, talker, plan)
    elif options.ref_text:
        raise invalid("ref_text", "only with ref_audio, the sample that it is said in")
    elif (speaker := _own_voice(options, talker, voice)) is None:
        await _imitate_uploaded(gateway, options, talker, plan, owner, voice)
    elif options.x_vector_only_mode is not None:
        raise invalid("x_vector_only_mode", "only with a voice sample: ref_audio, or an uploaded voice")
    else:
        _speak_as(plan, speaker, talker)
    return plan


def _speak_as(plan: SpeakPlan, speaker: str, talker: TalkerInfo) -> None:
    plan.start.speaker, plan.voice = speaker, speaker or next(iter(talker.speakers), "")


def _check_task(task: Task | None, talker: TalkerInfo) -> None:
    able = {"CustomVoice": bool(talker.speakers), "Base": talker.voice_sample_rate_hz > 0}
    able["VoiceDesign"] = not any(able.values())
    if task is not None and not able[task]:
        can = " and ".join(name for name, is_able in able.items() if is_able)
        raise invalid("task_type", f"this model does {can}")


def _language(language: str | None, talker: TalkerInfo) -> str:
    """As the talker spells it; "": automatic. Raises ApiError."""
    if language is None or language.lower() == "auto":
        return ""
    if not talker.languages:
        raise invalid("language", "this model hears it from the text; leave it out, or send auto")
    match = match_case(language, talker.languages)
    if match is None:
        raise invalid("language", f"no language {language!r}; use auto or one of {', '.join(talker.languages)}")
    return match


async def _imitate_ref_audio(gateway: Gateway, options: VoiceOptions, talker: TalkerInfo, plan: SpeakPlan) -> None:
    rate_hz = talker.voice_sample_rate_hz
    if not rate_hz:
        raise invalid("ref_audio", "this model imitates no voices; leave it out")
    if options.x_vector_only_mode is False and not options.ref_text:
        reason = "required: what is said in ref_audio; or send x_vector_only_mode true, and the voice alone is taken"
        raise invalid("ref_text", reason, "missing_required_parameter")
    assert options.ref_audio is not None
    with media_errors("ref_audio"):
        content = await gateway.fetcher.get_or_decode(options.ref_audio, "audio", MAX_BYTES)
        samples = await gateway.fetcher.decoding.run(read_sample, content, rate_hz)
    text = "" if options.x_vector_only_mode else options.ref_text or ""
    plan.imitate(samples, rate_hz, text, ("ref_audio", "ref_text"))


def _own_voice(options: VoiceOptions, talker: TalkerInfo, param: str) -> str | None:
    """The talker's own voice; "": its default, or a described one; None: not its own. Raises ApiError."""
    named = options.voice and options.voice.id
    if talker.voice_sample_rate_hz:
        if named is None and not talker.speakers:
            raise _required(param)
        # None also for OpenAI's: an uploaded one may have that name
        return "" if named is None else match_case(named, talker.speakers)
    if named is None or (not talker.speakers and is_openai_voice(named)):
        return ""
    if not talker.speakers:
        raise invalid(param, "this model has no voices; leave it out and say in instructions who speaks")
    return own_voice(named, talker.speakers)


def _required(param: str) -> ApiError:
    sample = "Send ref_audio, a sample of it, or upload one" if param == "voice" else "Upload a sample of it"
    reason = f"required: this model has no voices of its own, it imitates one. {sample}"
    reason += " by POST /v1/audio/voices (quartet voice add) and send its name"
    return invalid(param, reason, "missing_required_parameter")


async def _imitate_uploaded(
    gateway: Gateway, options: VoiceOptions, talker: TalkerInfo, plan: SpeakPlan, owner: str | None, param: str
) -> None:
    assert options.voice is not None
    rate_hz, voices = talker.voice_sample_rate_hz, list(talker.speakers)
    if rate_hz:
        voice = await gateway.voices.find(options.voice.id, owner)
        flac = None if voice is None else await gateway.voices.sample(voice)
        voices += [known.name for known in await gateway.voices.all_of(owner)] if flac is None else []
        if voice is not None and flac is not None:
            if options.x_vector_only_mode is False and not voice.text:
                reason = f"what is said in the sample of {voice.name!r} is not known; leave this out"
                raise invalid("x_vector_only_mode", reason)
            samples = await asyncio.to_thread(from_flac, flac, rate_hz)
            plan.imitate(samples, rate_hz, "" if options.x_vector_only_mode else voice.text, (param, param))
            plan.log["voice"] = plan.voice = voice.id
            return
    if is_openai_voice(options.voice.id):
        if not talker.speakers:
            raise _required(param)
        _speak_as(plan, own_voice(options.voice.id, talker.speakers) or "", talker)
        return
    listed = voices[:_MAX_LISTED_VOICES] + (["..."] if len(voices) > _MAX_LISTED_VOICES else [])
    known = f"use one of {', '.join(listed)}" if voices else "none has been uploaded to this gateway"
    how = "; or upload one by POST /v1/audio/voices, or send ref_audio" if rate_hz else ""
    raise invalid(param, f"no voice {options.voice.id!r}; {known}{how}")
