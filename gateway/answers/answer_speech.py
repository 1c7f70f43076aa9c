"""How an answer is spoken."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.answers.gateway import Gateway
from gateway.answers.voice_options import SpeakPlan, VoiceId, VoiceOptions, plan_speech
from gateway.pipeline.run import speech
from quartet.v1 import talker_pb2


@dataclass(frozen=True)
class AnswerSpeech:
    """Speech of what a thinker writes.

    Attributes:
        starts: start messages of the stages that speak, by kind.
        utterance_bytes: see `Job`.
    """

    starts: Mapping[str, Any]
    utterance_bytes: int = 0


async def answer_speech(
    gateway: Gateway, voice: str | None, sampling: talker_pb2.TalkerSampling, owner: str | None, param: str
) -> AnswerSpeech:
    """Speech by a voice of the talker's or, if it reads text and imitates voices, of `owner`'s uploaded ones.

    Raises:
        ApiError: 400 for `param`, there is no such voice; 503, a stage was never reached.
    """
    if not gateway.pipeline.config.speaks_text:
        speaker = gateway.catalog.speaker(voice, param)
        return AnswerSpeech(speech(talker_pb2.SpeakStart(speaker=speaker, sampling=sampling)))
    # False: else some talkers would wait for the whole text
    plan = await plan_voice(gateway, voice, sampling, owner, param, whole_text_first=False)
    most_bytes = plan.most_bytes(gateway.catalog.info("talker"), gateway.catalog.info("code2wav"))
    return AnswerSpeech(speech(plan.start), most_bytes)


async def plan_voice(
    gateway: Gateway,
    voice: str | None,
    sampling: talker_pb2.TalkerSampling,
    owner: str | None,
    param: str,
    *,
    whole_text_first: bool | None = None,
) -> SpeakPlan:
    """Speech of a text by a voice, which is the member `param` of the request. Raises ApiError."""
    options = VoiceOptions(voice=None if voice is None else VoiceId(id=voice), non_streaming_mode=whole_text_first)
    plan = await plan_speech(gateway, options, gateway.catalog.info("talker"), owner, param)
    plan.start.sampling.CopyFrom(sampling)
    return plan
