"""Prompts that no chat template writes, as texts or token ids: their answers, and the thinker's tokenizer."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from copy import deepcopy
from typing import Any

import grpc

from gateway.answers.answer import WholeAnswer, usage
from gateway.answers.gateway import Gateway
from gateway.answers.jobs import refuse_large, sampling_of
from gateway.answers.meter import Meter
from gateway.answers.raw_speech import RawSpeech
from gateway.answers.request import WriterSampling
from gateway.errors import ApiError, from_error, invalid
from gateway.pipeline.events import AudioDelta, CodesDelta, Finished, PromptTokens, TextDelta
from gateway.pipeline.run import Job, run, speech
from quartet.v1 import thinker_pb2, thinker_pb2_grpc
from services.common.errors import StageError

_MAX_TOKENIZER_BYTES = 4 * 1024 * 1024  # of a text, or of ids as protobuf packs them

Step = tuple[WholeAnswer, PromptTokens | TextDelta | CodesDelta | AudioDelta | None]
"""(the answer, what is new of it, or None: it has ended)."""
# What a chat calls what a talker refuses, and what a raw prompt's request does; the prompt itself is `field`.
_TALKERS = {"audio.voice": "speech.voice", "quartet.talker.": "speech.sampling_params."}


class CompletionRun:
    """Answers to raw prompts, in text and speech.

    Args:
        gateway: the gateway.
        sampling: how they are written.
        state: the request's id, deadline and log line.
        prompts: what is gone on with.
        model, lora: as the request names them.
        count: answers to each prompt, each with the seed of the one before + 1.
        max_tokens: of each answer; None: up to the longest context.
        field: what the request calls its prompts.
        media: files that follow the prompt, where there is one.
        raw_speech: how answers are spoken; None: they are text.

    Attributes:
        answers: those to the first prompt first.

    Raises:
        ApiError: 400 or 404, there is no such model, or it does not write; or there are too many answers.
    """

    def __init__(
        self,
        gateway: Gateway,
        sampling: WriterSampling,
        state: Any,
        prompts: Sequence[thinker_pb2.RawPrompt],
        model: str | None,
        lora: str | None,
        count: int,
        max_tokens: int | None,
        field: str,
        media: Sequence[bytes] = (),
        raw_speech: RawSpeech | None = None,
    ) -> None:
        gateway.stage_for("text", model, takes_loras=True)
        if count > gateway.settings.max_choices:
            raise invalid("n", f"at most {gateway.settings.max_choices} answers to a prompt")
        self._gateway, self._sampling, self._prompts, self._count = gateway, sampling, prompts, count
        self._lora, self._max_tokens, self._field, self._media = gateway.lora_of(model, lora), max_tokens, field, media
        self._speech = raw_speech
        self._meter = Meter.of(state, gateway.settings.request_timeout_s)
        self.answers = [WholeAnswer(i, "", 0) for i in range(len(prompts) * count)]
        self._meter.log["answers"] = len(self.answers)
        if sampling.seed is not None and sampling.seed + len(self.answers) > 2**63:
            raise invalid("seed", f"each answer's is one more: at most {2**63 - len(self.answers)} for so many")

    async def events(self, top_logprobs: int | None, prompt_logprobs: int | None = None) -> AsyncGenerator[Step, None]:
        """Yields the answers' events.

        Args:
            top_logprobs: alternatives for each token; None: no log-probabilities.
            prompt_logprobs: the same for the prompt's tokens; the first answer to each prompt has them.

        Raises:
            ApiError: as a chat's, with the field that has the prompts.
        """
        jobs = [self._job(i, top_logprobs, prompt_logprobs) for i in range(len(self.answers))]
        try:
            async with aclosing(run(self._gateway.pipeline, jobs, self._meter.left_s)) as events:
                async for index, event in events:
                    self.answers[index].take(event)
                    self._meter.observe(event)
                    if isinstance(event, PromptTokens | TextDelta | CodesDelta | AudioDelta):
                        yield self.answers[index], event
                    elif isinstance(event, Finished):
                        yield self.answers[index], None
        except StageError as error:
            raise self._in_own_terms(from_error("gateway", error)) from error
        self._count_tokens()

    def _job(self, index: int, top_logprobs: int | None, prompt_logprobs: int | None) -> Job:
        sampling = sampling_of(self._gateway, self._sampling, self._max_tokens, top_logprobs)
        if prompt_logprobs is not None and index % self._count == 0:
            sampling.prompt_logprobs = prompt_logprobs
        if sampling.HasField("seed"):
            sampling.seed += index
        start = thinker_pb2.GenerateStart(
            prompt=self._prompts[index // self._count],
            sampling=sampling,
            priority=self._sampling.priority or 0,
            lora=self._lora,
        )
        refuse_large(start, self._field)
        request_id = self._meter.request_id
        name = request_id if len(self.answers) == 1 else f"{request_id}-{index}"
        return Job(name, {"thinker": start} | self._spoken(index), self._media)

    def _spoken(self, index: int) -> dict[str, Any]:
        """Start messages of the stages that speak answer `index`."""
        if self._speech is None:
            return {}
        speak = deepcopy(self._speech.start)
        speak.sampling.seed += index
        starts = speech(speak)
        return starts if self._speech.audio else {"talker": starts["talker"]}

    def _in_own_terms(self, error: ApiError) -> ApiError:
        if (param := error.param) is None:
            return error
        own = self._field if param.split(".")[0] == "prompt" else param
        if param == "prompt_logprobs":
            own = "echo" if self._field == "prompt" else f"sampling_params.{param}"
        if self._speech is not None:
            own = self._field if param == "messages" else own
            for chats, ours in _TALKERS.items():
                own = ours + own.removeprefix(chats) if own.startswith(chats) else own
        error.rename(own)
        return error

    def usage(self) -> dict[str, Any]:
        """Tokens of all prompts and answers, as far as they have come; of answers that have ended codec frames, too."""
        tokens = usage(self.answers)
        first = [self.answers[i] for i in range(0, len(self.answers), self._count)]
        read = sum(answer.prompt.prompt_tokens for answer in first)
        cached = sum(answer.end.thinker.cached_tokens for answer in first if answer.end and answer.end.thinker)
        written = tokens["completion_tokens"]
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": cached},
            **({} if self._speech is None else {"completion_tokens_details": tokens["completion_tokens_details"]}),
        }

    def _count_tokens(self) -> None:
        read, details = self.usage()["prompt_tokens"], usage(self.answers)["completion_tokens_details"]
        self._meter.count(read, details["text_tokens"], None if self._speech is None else details["audio_tokens"])
        self._meter.count_speech(self.answers)


async def ask_tokenizer(gateway: Gateway, model: str | None, method: str, message: Any, field: str) -> Any:
    """What a replica of the thinker answers to `message`, by its tokenizer.

    Raises:
        ApiError: as a chat's; `field` is what the request calls its text or ids.
    """
    stage = gateway.stage_for("text", model, takes_loras=True)
    if message.ByteSize() > _MAX_TOKENIZER_BYTES:
        raise invalid(field, f"is more than the {_MAX_TOKENIZER_BYTES} bytes that are taken", "context_length_exceeded")
    try:
        replica = stage.choose()
        try:
            call = getattr(thinker_pb2_grpc.ThinkerServiceStub(replica.channel), method)
            return await call(message, timeout=gateway.settings.request_timeout_s)
        except grpc.aio.AioRpcError as error:
            raise replica.failure(error) from error
    except StageError as error:
        refusal = from_error("thinker", error)
        if refusal.param in ("token_ids", "text"):
            refusal.rename(field)
        raise refusal from error


async def detokenize(gateway: Gateway, token_ids: Sequence[int], field: str) -> str:
    """The text of ids. Raises ApiError: 400 naming `field`, one is not in the vocabulary."""
    message = thinker_pb2.DetokenizeRequest(token_ids=token_ids)
    return (await ask_tokenizer(gateway, None, "Detokenize", message, field)).text
