"""Speech of a raw prompt, Quartet's own part of `/inference/v1/generate`: codec frames, audio, or both."""

import asyncio
import secrets
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
        ApiError: 400, there is no such voice; 503, the talker or code2wav was never found serving.
    """

    def __init__(self, gateway: Gateway, params: SpeechParams, seed: int | None, stream: bool) -> None:
        self.audio = params.audio
        self._format: AudioFormat = params.format or ("pcm16" if stream else "wav")
        self._codes = params.codes
        sampling = gateway.talker_sampling(params.sampling_params, seed)
        if not sampling.HasField("seed"):
            sampling.seed = secrets.randbits(31)
        self.start = talker_pb2.SpeakStart(
            speaker=gateway.speaker(params.voice, "speech.voice"), sampling=sampling, wants_frames=params.codes
        )
        talker, code2wav = gateway.pipeline.info("talker"), gateway.pipeline.info("code2wav")
        if talker is None or code2wav is None:
            raise gateway.not_known_yet("talker", "code2wav")
        self._groups, self._rate_hz, self._samples = (
            talker.num_code_groups,
            code2wav.sample_rate_hz,
            code2wav.samples_per_frame,
        )

    def facts(self) -> dict[str, Any]:
        return {
            "code_groups": self._groups,
            "frames_per_second": self._rate_hz / self._samples,
            "sample_rate_hz": self._rate_hz,
        }

    def delta(self, event: CodesDelta | AudioDelta) -> dict[str, Any]:
        if isinstance(event, CodesDelta):
            return {"codes": event.frames}
        return {"audio": self._encoded(event.pcm16)}

    def end(self, answer: WholeAnswer) -> dict[str, Any]:
        """The reason of the end, and the seed."""
        talker = answer.end and answer.end.talker
        reason = _ENDS.get(talker.end, "stop") if talker else "abort"
        return {"seed": self.start.sampling.seed + answer.index, "finish_reason": reason}

    async def whole(self, answer: WholeAnswer) -> dict[str, Any]:
        speech: dict[str, Any] = {"codes": answer.codes} if self._codes else {}
        if self.audio:
            sound = bytes(answer.samples)
            speech["audio"] = await asyncio.to_thread(self._encoded, sound) if sound else None
        return speech | self.end(answer)

    def _encoded(self, pcm16: bytes) -> dict[str, Any]:
        data = encode_audio(pcm16, self._rate_hz, self._format)
        return {"data": pybase64.b64encode_as_string(data), "format": self._format}
