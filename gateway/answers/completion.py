"""Answers to prompts as they are, texts or token ids, in text and speech; and the thinker's tokenizer."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Self

import pybase64
from pydantic import Field

from gateway.access.places import Places
from gateway.answers.answer import WholeAnswer, usage
from gateway.answers.answer_speech import AnswerSpeech, answer_speech
from gateway.answers.beams import beams
from gateway.answers.gateway import Gateway
from gateway.answers.meter import Meter
from gateway.answers.prompt_messages import refuse_large
from gateway.answers.request import AudioFormat, WriterSampling
from gateway.answers.sampling import sampling_of, talker_sampling
from gateway.errors import in_own_terms, invalid
from gateway.media.encode import encode_audio
from gateway.pipeline.events import AudioDelta, CodesDelta, Event, Finished, PromptTokens, TextDelta
from gateway.pipeline.run import Job, run
from gateway.pipeline.sampling import TalkerSampling
from gateway.validation import Strict
from quartet.v1 import talker_pb2, thinker_pb2

_MAX_TOKENIZER_BYTES = 4 * 1024 * 1024  # of a text, or of ids as protobuf packs them

Step = tuple[WholeAnswer, PromptTokens | TextDelta | CodesDelta | AudioDelta | None]
"""(the answer, what is new of it, or None: it has ended)."""
# What a chat calls what a talker refuses, and what a raw prompt's request does; the prompt itself is `field`.
_TALKERS = {"audio.voice": "speech.voice", "quartet.talker.": "speech.sampling_params."}
_NAMES = {"top_logprobs": "logprobs", "prompt.opens_thought": "reasoning_ended"}
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
    format: AudioFormat | None = Field(default=None, description="default: wav; a stream: pcm16, the default, or wav")
    sampling_params: TalkerSampling = Field(default=TalkerSampling(), description="how codec frames are sampled")
    logprobs: Any = Field(default=None, description="refused: codes come without log-probabilities")

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
    """Speech of one request; `begin` makes it.

    Raises:
        ApiError: 503, talker or code2wav was never reached.
    """

    def __init__(self, gateway: Gateway, params: SpeechParams, spoken: AnswerSpeech, stream: bool) -> None:
        self._params, self._spoken = params, spoken
        self._format: AudioFormat = params.format or ("pcm16" if stream else "wav")
        self._talker, self._code2wav = gateway.catalog.info("talker"), gateway.catalog.info("code2wav")

    @classmethod
    async def begin(
        cls, gateway: Gateway, params: SpeechParams, seed: int | None, stream: bool, owner: str | None
    ) -> Self:
        """`seed` is the text's, used where `params` has none. Raises ApiError: 400, there is no such voice."""
        sampling = talker_sampling(gateway, params.sampling_params, seed)
        if not sampling.HasField("seed"):
            sampling.seed = secrets.randbits(31)
        spoken = await answer_speech(gateway, params.voice, sampling, owner, "speech.voice")
        return cls(gateway, params, spoken, stream)

    @property
    def utterance_bytes(self) -> int:
        return self._spoken.utterance_bytes

    def starts(self, index: int) -> dict[str, Any]:
        """Start messages of the stages that speak answer `index`."""
        starts = deepcopy(dict(self._spoken.starts))
        starts["talker"].sampling.seed += index
        starts["talker"].wants_frames = self._params.codes
        return starts if self._params.audio else {"talker": starts["talker"]}

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
        return {"seed": self._spoken.starts["talker"].sampling.seed + answer.index, "finish_reason": reason}

    async def whole(self, answer: WholeAnswer) -> dict[str, Any]:
        parts: dict[str, Any] = {"codes": answer.codes} if self._params.codes else {}
        if self._params.audio:
            sound = bytes(answer.samples)
            parts["audio"] = await asyncio.to_thread(self._encoded, sound) if sound else None
        return parts | self.end(answer)

    def _encoded(self, pcm16: bytes) -> dict[str, Any]:
        data = encode_audio(pcm16, self._code2wav.sample_rate_hz, self._format)
        return {"data": pybase64.b64encode_as_string(data), "format": self._format}


@dataclass
class CompletionRun:
    """Answers to raw prompts, in text and speech.

    Attributes:
        state: the request's id, deadline and log line.
        count: answers to each prompt, each with the seed of the one before + 1.
        max_tokens: of each answer; None: up to the longest context.
        field: what the request calls its prompts.
        media: files that follow the prompt.
        speech: how answers are spoken; None: they are text.
        cut: writes into a start message how a long prompt is cut.
        choose: writes into the sampling whose log-probabilities come, instead of the likeliest tokens'.
        wants_prompt_ids: the ids of the prompt come with it.
        search: asks for so many beams in a start message; None: each answer is drawn by itself.
        answers: those to the first prompt first.

    Raises:
        ApiError: 400 or 404, the model is not here or does not write, or there are too many answers.
    """

    gateway: Gateway
    sampling: WriterSampling
    state: Any
    prompts: Sequence[thinker_pb2.RawPrompt]
    model: str | None
    count: int
    field: str
    lora: str | None = None
    max_tokens: int | None = None
    media: Sequence[bytes] = ()
    speech: RawSpeech | None = None
    cut: Callable[[thinker_pb2.GenerateStart], None] = lambda start: None
    choose: Callable[[thinker_pb2.SamplingParameters], None] = lambda sampling: None
    wants_prompt_ids: bool = False
    search: Callable[[thinker_pb2.GenerateStart, int], None] | None = None

    def __post_init__(self) -> None:
        settings = self.gateway.settings
        self.gateway.catalog.stage_for("text", self.model, takes_loras=True)
        if self.count > settings.max_choices:
            raise invalid("n", f"at most {settings.max_choices} answers to a prompt")
        self._lora = self.gateway.catalog.lora_of(self.model, self.lora)
        self._meter = Meter.of(self.state, settings.request_timeout_s)
        self.answers = [WholeAnswer(i, "", 0) for i in range(len(self.prompts) * self.count)]
        self._meter.log["answers"] = len(self.answers)
        seed, most = self.sampling.seed, 2**63 - len(self.answers)
        if seed is not None and seed > most:
            raise invalid("seed", f"each answer's is one more: at most {most} for so many")

    async def events(self, top_logprobs: int | None, prompt_logprobs: int | None) -> AsyncGenerator[Step, None]:
        """Raises ApiError as a chat's, with the request's own names.

        Args:
            top_logprobs: alternatives for each token; None: no log-probabilities.
            prompt_logprobs: the same for the prompt's tokens; the first answer to each prompt has them.
        """
        jobs = _Jobs(self, sampling_of(self.gateway, self.sampling, self.max_tokens, top_logprobs), prompt_logprobs)
        jobs.refuse_large()
        self._meter.charge(len(self.answers), "n" if self.count > 1 else self.field)
        with in_own_terms(self.own_name):
            async with aclosing(self._events(jobs)) as events:
                async for index, event in events:
                    self.answers[index].take(event)
                    self._meter.observe(event)
                    if isinstance(event, PromptTokens | TextDelta | CodesDelta | AudioDelta):
                        yield self.answers[index], event
                    elif isinstance(event, Finished):
                        yield self.answers[index], None
        details = usage(self.answers)["completion_tokens_details"]
        frames = None if self.speech is None else details["audio_tokens"]
        self._meter.count(self.usage()["prompt_tokens"], details["text_tokens"], frames)
        self._meter.count_speech(self.answers)

    def _events(self, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, Event], None]:
        if self.search is not None:
            return beams(self.gateway, jobs, self.count, self._meter)
        places = Places(self.gateway.admission, self._meter.key)
        return run(self.gateway.pipeline, jobs, self._meter.left_s, places.take)

    @property
    def jobs_of_prompt(self) -> int:
        return self.count if self.search is None else 1

    def start(self, index: int, sampling: thinker_pb2.SamplingParameters) -> thinker_pb2.GenerateStart:
        """The thinker's start message of job `index`."""
        start = thinker_pb2.GenerateStart(
            prompt=self.prompts[index // self.jobs_of_prompt],
            sampling=sampling,
            priority=self.sampling.priority or 0,
            lora=self._lora,
            wants_prompt_token_ids=self.wants_prompt_ids,
        )
        self.cut(start)
        self.choose(start.sampling)
        if self.search is not None:
            self.search(start, self.count)
        return start

    def job(self, index: int, start: thinker_pb2.GenerateStart) -> Job:
        request_id = self._meter.request_id
        name = request_id if len(self.answers) == 1 else f"{request_id}-{index}"
        if self.speech is None:
            return Job(name, {"thinker": start}, self.media)
        starts = {"thinker": start, **self.speech.starts(index)}
        return Job(name, starts, self.media, utterance_bytes=self.speech.utterance_bytes)

    def own_name(self, member: str) -> str:
        """The request's name of what a chat's refusal calls `member`."""
        member = self.sampling.own_name(member)
        member = _NAMES.get(member, member)
        if member.split(".")[0] == "prompt" or (member == "messages" and self.speech is not None):
            return self.field
        if self.field == "token_ids" and member.split(".")[0] in type(self.sampling).model_fields:
            return f"sampling_params.{member}"
        if member == "prompt_logprobs" and getattr(self.sampling, member, None) is None:
            return "echo"
        for chats, ours in _TALKERS.items():
            if member.startswith(chats):
                return ours + member.removeprefix(chats)
        return member

    def usage(self) -> dict[str, Any]:
        """Tokens so far; codec frames of answers that have ended."""
        tokens, firsts = usage(self.answers), self.answers[:: self.count]
        read = sum(answer.prompt.prompt_tokens for answer in firsts)
        cached = sum(answer.end.thinker.cached_tokens for answer in firsts if answer.end.thinker)
        written = tokens["completion_tokens"]
        counts = {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if self.speech is not None:
            counts["completion_tokens_details"] = tokens["completion_tokens_details"]
        return counts


@dataclass
class _Jobs(Sequence[Job]):
    """The jobs of a run, each made when it begins: it may have megabytes."""

    run: CompletionRun
    sampling: thinker_pb2.SamplingParameters
    prompt_logprobs: int | None

    def __len__(self) -> int:
        return len(self.run.prompts) * self.run.jobs_of_prompt

    def __getitem__(self, index: Any) -> Any:
        start = self.run.start(index, self.sampling)
        if index % self.run.jobs_of_prompt:
            start.sampling.ClearField("prompt_logprob_token_ids")
        elif self.prompt_logprobs is not None:
            start.sampling.prompt_logprobs = self.prompt_logprobs
        if start.sampling.HasField("seed"):
            start.sampling.seed += index
        return self.run.job(index, start)

    def refuse_large(self) -> None:
        """Raises ApiError: 400, there is a prompt that is too long."""
        longest = max(range(len(self.run.prompts)), key=lambda i: self.run.prompts[i].ByteSize())
        refuse_large(self.run.start(longest * self.run.jobs_of_prompt, self.sampling), self.run.field)


async def ask_tokenizer(gateway: Gateway, model: str | None, method: str, message: Any, field: str) -> Any:
    """The thinker's response to `message`. Raises ApiError; `field` is the request's text or ids."""
    stage = gateway.catalog.stage_for("text", model, takes_loras=True)
    if message.ByteSize() > _MAX_TOKENIZER_BYTES:
        raise invalid(field, f"is more than the {_MAX_TOKENIZER_BYTES} bytes that are taken", "context_length_exceeded")
    with in_own_terms(lambda member: field if member in ("token_ids", "text") else member, "thinker"):
        return await stage.choose().ask(method, message, gateway.settings.request_timeout_s)


async def detokenize(gateway: Gateway, token_ids: Sequence[int], field: str) -> str:
    """The text of ids. Raises ApiError: 400 naming `field`, one is not in the vocabulary."""
    message = thinker_pb2.DetokenizeRequest(token_ids=token_ids)
    return (await ask_tokenizer(gateway, None, "Detokenize", message, field)).text
