"""Speech of a raw prompt, Quartet's own part of `/inference/v1/generate`: codec frames, audio, or both."""

import asyncio
import secrets
from copy import deepcopy
from typing import Any

import pybase64
from pydantic import Field

from gateway.answers.answer import WholeAnswer
from gateway.answers.gateway import Gateway
from gateway.answers.request import AudioFormat
from gateway.errors import invalid
from gateway.media.encode import encode_audio
from gateway.pipeline.config import TalkerSampling
from gateway.pipeline.events import AudioDelta, CodesDelta
from gateway.pipeline.run import speech
from gateway.validation import Strict
from quartet.v1 import talker_pb2

_ENDS = {
    talker_pb2.SPEECH_END_STOP: "stop",
    talker_pb2.SPEECH_END_LENGTH: "length",
    talker_pb2.SPEECH_END_EMPTY: "empty",
}


class SpeechParams(Strict):
    """How the text is spoken, and what is returned of it."""

    voice: str | None = Field(default=None, description="one of the model's voices; default: its first")
    codes: bool = Field(default=True, description="the codec frames, as the talker samples them")
    audio: bool = Field(default=False, description="the sound that they are decoded to")
    format: AudioFormat | None = Field(
        default=None, description="of the sound; default: pcm16 in a stream, else wav; a stream has these two only"
    )
    sampling_params: TalkerSampling = Field(default=TalkerSampling(), description="how codec frames are sampled")
    logprobs: Any = Field(default=None, description="refused: those of codes are not told")

    def check(self, gateway: Gateway, stream: bool) -> None:
        """Raises ApiError: 400 naming a member that contradicts another, or is not supported."""
        if gateway.pipeline.config.outputs.speech is None:
            raise invalid("speech", "this server does not speak; leave it out")
        if self.logprobs is not None:
            raise invalid("speech.logprobs", "the talker does not tell those of its codes; leave it out")
        if not (self.codes or self.audio):
            raise invalid("speech.codes", "neither codes nor audio are wanted; leave out speech, or set one of them")
        if self.format is not None and not self.audio:
            raise invalid("speech.format", "only with audio: true")
        if stream and self.format not in (None, "pcm16", "wav"):
            raise invalid("speech.format", "a stream has pcm16 or wav; leave it out, or set stream to false")


class RawSpeech:
    """Speech of one request. `seed` is the text's, used where `params` has none.

    Raises:
        ApiError: 400, there is no such voice; 503, talker or code2wav was never reached.
    """

    def __init__(self, gateway: Gateway, params: SpeechParams, seed: int | None, stream: bool) -> None:
        self._params = params
        self._format: AudioFormat = params.format or ("pcm16" if stream else "wav")
        sampling = gateway.talker_sampling(params.sampling_params, seed)
        if not sampling.HasField("seed"):
            sampling.seed = secrets.randbits(31)
        speaker = gateway.speaker(params.voice, "speech.voice")
        self._start = talker_pb2.SpeakStart(speaker=speaker, sampling=sampling, wants_frames=params.codes)
        self._talker, self._code2wav = gateway.known("talker"), gateway.known("code2wav")

    def starts(self, index: int) -> dict[str, Any]:
        """Start messages of the stages that speak answer `index`."""
        speak = deepcopy(self._start)
        speak.sampling.seed += index
        return speech(speak) if self._params.audio else {"talker": speak}

    def facts(self) -> dict[str, Any]:
        rate_hz = self._code2wav.sample_rate_hz
        return {
            "code_groups": self._talker.num_code_groups,
            "frames_per_second": rate_hz / self._code2wav.samples_per_frame,
            "sample_rate_hz": rate_hz,
        }

    def delta(self, event: CodesDelta | AudioDelta) -> dict[str, Any]:
        if isinstance(event, CodesDelta):
            return {"codes": event.frames}
        return {"audio": self._encoded(event.pcm16)}

    def end(self, answer: WholeAnswer) -> dict[str, Any]:
        talker = answer.end.talker
        reason = _ENDS.get(talker.end, "stop") if talker else "abort"
        return {"seed": self._start.sampling.seed + answer.index, "finish_reason": reason}

    async def whole(self, answer: WholeAnswer) -> dict[str, Any]:
        parts: dict[str, Any] = {"codes": answer.codes} if self._params.codes else {}
        if self._params.audio:
            sound = bytes(answer.samples)
            parts["audio"] = await asyncio.to_thread(self._encoded, sound) if sound else None
        return parts | self.end(answer)

    def _encoded(self, pcm16: bytes) -> dict[str, Any]:
        data = encode_audio(pcm16, self._code2wav.sample_rate_hz, self._format)
        return {"data": pybase64.b64encode_as_string(data), "format": self._format}
