"""`POST /v1/completions`: continues a prompt without a chat template."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from gateway.answers import harmless
from gateway.answers.answer import WholeAnswer, logprobs, prompt_logprobs
from gateway.answers.beams import BeamMembers
from gateway.answers.completion import CompletionRun, detokenize
from gateway.answers.extensions import LogprobMembers, PromptMembers, TopLogprobs
from gateway.answers.gateway import Gateway
from gateway.answers.prompt_messages import refuse_long
from gateway.answers.request import StreamOptions, WriterSampling
from gateway.errors import invalid
from gateway.http.connection import DONE, admitted, drain, respond, sse
from gateway.http.forms import page, read_json
from gateway.http.json_writer import Json
from gateway.pipeline.events import PromptTokens, TextDelta
from gateway.validation import Listed, ModelName, Positive, TokenIds, ignoring
from quartet.v1 import thinker_pb2
from services.common.sampling_limits import WHOLE_VOCABULARY

router = APIRouter(tags=["completions"])
_DEFAULT_TOKENS = 16  # OpenAI's
_MAX_PROMPTS = 128
_EMPTY = (*harmless.OF_VLLM, "kv_transfer_params")


class CompletionRequest(
    BeamMembers,
    LogprobMembers,
    PromptMembers,
    ignoring(WriterSampling, *harmless.COMPLETIONS, empty=_EMPTY),
):
    """A request for completions: OpenAI's parameters, and vLLM's further ones."""

    model: ModelName = Field(default="", description="default: the one that writes")
    prompt: str | Listed[str] | TokenIds | Listed[TokenIds] = Field(
        description="a text or token ids, or a list of either"
    )
    max_tokens: Positive | None = Field(default=None, description="most tokens of each completion; default: 16")
    n: Annotated[int, Field(ge=1, le=128)] | None = Field(default=None, description="completions of each prompt")
    best_of: Annotated[int, Field(ge=1)] | None = Field(default=None, description="as many as n: all are told")
    echo: bool | None = Field(default=None, description="the prompt before the completion; in logprobs, too")
    logprobs: TopLogprobs | None = Field(default=None, description="alternatives a token; -1 is all")
    suffix: str | None = Field(default=None, description="refused: models here do not fill in")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    lora: str | None = Field(default=None, description="adapter of the model; it can be named as `model`, too")
    return_token_ids: bool | None = Field(
        default=None, description="choices have token_ids, and prompt_token_ids; of a stream, the first chunk of each"
    )
    return_tokens_as_token_ids: bool | None = Field(default=None, description="in logprobs a token is token_id:ID")
    prompt_logprobs: TopLogprobs | None = Field(
        default=None, description="alternatives of each of the prompt's tokens, -1 is all; not in a stream"
    )

    @property
    def most_tokens(self) -> int:
        return self.max_tokens or _DEFAULT_TOKENS

    @property
    def of_prompt(self) -> int | None:
        """Alternatives for each token of the prompt; None: no log-probabilities."""
        echoed = self.logprobs if self.echo else None
        wanted = [each for each in (self.prompt_logprobs, echoed) if each is not None]
        return min(wanted) if WHOLE_VOCABULARY in wanted else max(wanted, default=None)

    @property
    def prompts(self) -> list[thinker_pb2.RawPrompt]:
        """Raises ApiError: 400, a prompt is empty, or there are too many."""
        given = self.prompt
        single = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
        prompts = [given] if single else list(given)
        if len(prompts) > _MAX_PROMPTS:
            raise invalid("prompt", f"has {len(prompts)} prompts; at most {_MAX_PROMPTS} are taken")
        if not prompts or not all(prompts):
            raise invalid("prompt", "must not be empty")
        refuse_long((each for each in prompts if isinstance(each, str)), "prompt")
        return [
            thinker_pb2.RawPrompt(text=each)
            if isinstance(each, str)
            else thinker_pb2.RawPrompt(token_ids=thinker_pb2.TokenIds(ids=each))  # pyright: ignore[reportArgumentType]
            for each in prompts
        ]

    def check(self) -> None:
        """Raises ApiError: 400 naming a parameter that contradicts another, or is not supported."""
        if self.suffix:
            raise invalid("suffix", "models here do not fill in; leave it out")
        self.check_beams(self.n or 1)
        self.check_logprobs(self.logprobs is not None)
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise invalid("best_of", "must be n: all completions are told")
        if self.stream and self.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "a stream does not tell them; set stream to false")
        if self.echo and self.truncate_prompt_tokens is not None:
            raise invalid("echo", "cannot be beside truncate_prompt_tokens; leave one of the two out")
        if self.stream and self.of_prompt is not None and (self.n or 1) > 1:
            raise invalid("echo", "a stream of several answers has no log-probabilities of prompts; set n or stream")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "only with stream: true")


_OPENAPI = page(CompletionRequest, "text_completion, or with stream: true its chunks")


@router.post("/v1/completions", openapi_extra=_OPENAPI)
async def completions(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Continues prompts as they are: no chat template, no speech."""
    return await complete(http, gateway, await read_json(http, CompletionRequest))


async def complete(http: Request, gateway: Gateway, request: CompletionRequest) -> Response:
    """Raises ApiError."""
    request.check()
    request.model = gateway.catalog.meant(request.model) or ""
    return await respond(http, Completions(gateway, request, http), request.stream)


class Completions:
    def __init__(self, gateway: Gateway, request: CompletionRequest, http: Request) -> None:
        self._gateway, self._request = gateway, request
        count, most = request.n or 1, request.most_tokens
        self._run = CompletionRun(
            gateway, request, http.state, request.prompts, request.model, count, "prompt", request.lora, most
        )
        self._run.cut, self._run.choose = request.cut, request.choose
        self._run.search = request.search if request.use_beam_search else None
        self._run.wants_prompt_ids = bool(request.return_token_ids)
        self._asked = request.logprobs, request.of_prompt
        created = int(time.time())
        request_id = f"cmpl-{http.state.request_id}"
        self._head = {"id": request_id, "object": "text_completion", "created": created, "model": request.model}

    async def whole(self) -> Response:
        echoes = await self._echoes()
        await drain(self._run.events(*self._asked))
        has_logprobs = self._asked != (None, None)  # of tens of thousands of tokens, perhaps
        return await asyncio.to_thread(self._whole, echoes) if has_logprobs else self._whole(echoes)

    def _whole(self, echoes: list[str]) -> Response:
        choices = [
            self._choice(answer, echoes[answer.index] + answer.text, self._entries(answer, 0), 0, has_ended=True)
            | {"token_ids": None, "prompt_token_ids": None, **self._ids(answer, None)}
            for answer in self._run.answers
        ]
        wanted = self._request.prompt_logprobs is not None
        for choice in choices:
            choice["prompt_logprobs"] = prompt_logprobs(self._read_for(choice["index"])) if wanted else None
        return Json(self._head | {"choices": choices, "usage": self._run.usage()})

    async def stream(self) -> AsyncGenerator[bytes, None]:
        options, echoes = self._request.stream_options or StreamOptions(), await self._echoes()
        before = [len(echo) for echo in echoes]
        head = self._head | ({"usage": None} if options.include_usage else {})
        sent = [0] * len(echoes)  # log-probabilities of each answer
        sent_ids: list[int | None] = [None] * len(echoes)
        async with aclosing(self._run.events(*self._asked)) as events:
            async for answer, new in events:
                if isinstance(new, PromptTokens):  # they come with the answer's first token
                    continue
                written = new.delta.text if isinstance(new, TextDelta) else ""
                text, echoes[answer.index] = echoes[answer.index] + written, ""
                entries = self._entries(answer, sent[answer.index])
                if not (text or new is None or entries):
                    continue
                if options.include_usage and options.continuous_usage_stats:
                    head["usage"] = self._run.usage()
                offset = before[answer.index] + len(answer.text) - len(text)
                sent[answer.index] += len(entries)
                choice = self._choice(answer, text, entries, offset, has_ended=new is None)
                choice |= self._ids(answer, sent_ids[answer.index])
                sent_ids[answer.index] = len(answer.token_ids)
                yield sse(head | {"choices": [choice]})
        if options.include_usage:
            yield sse(head | {"choices": [], "usage": self._run.usage()})
        yield DONE

    async def _echoes(self) -> list[str]:
        """The text before each choice's own."""
        run = self._run
        if not self._request.echo:
            return [""] * len(run.answers)
        texts = [each.text or await detokenize(self._gateway, each.token_ids.ids, "prompt") for each in run.prompts]
        return [text for text in texts for _ in range(run.count)]

    def _ids(self, answer: WholeAnswer, begin: int | None) -> dict[str, Any]:
        """Ids of a choice from its `begin`th token on; None: nothing of it was sent, so the prompt's come along."""
        if not self._request.return_token_ids:
            return {}
        prompt = list(answer.prompt.token_ids) if begin is None else None
        return {"token_ids": answer.token_ids[begin or 0 :], "prompt_token_ids": prompt}

    def _choice(
        self, answer: WholeAnswer, text: str, entries: Sequence[thinker_pb2.TokenLogprob], offset: int, has_ended: bool
    ) -> dict[str, Any]:
        as_ids = bool(self._request.return_tokens_as_token_ids)
        tokens = None if self._request.logprobs is None else _tokens(entries, offset, as_ids)
        ended = {"finish_reason": answer.finish_reason, **answer.stop_reason} if has_ended else {"finish_reason": None}
        return {"index": answer.index, "text": text, "logprobs": tokens, **ended}

    def _read_for(self, index: int) -> list[thinker_pb2.TokenLogprob]:
        """The prompt of answer `index`."""
        return self._run.answers[index - index % self._run.count].prompt_tokens

    def _entries(self, answer: WholeAnswer, begin: int) -> list[thinker_pb2.TokenLogprob]:
        """Log-probabilities from token `begin` on; an echoed prompt's come first."""
        prompt = self._read_for(answer.index) if self._request.echo else []
        return [*prompt[begin:], *answer.tokens[max(0, begin - len(prompt)) :]]


def _tokens(entries: Sequence[thinker_pb2.TokenLogprob], offset: int, as_ids: bool) -> dict[str, Any]:
    """Log-probabilities as lists. `offset` is the first token's, in characters. A prompt's first token has none. The
    alternatives begin with the token itself: OpenAI always has it, and vLLM has it first."""
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.token)
    named = logprobs(entries, as_ids)
    known = [None if math.isnan(entry["logprob"]) else entry for entry in named]
    return {
        "tokens": [entry["token"] for entry in named],
        "token_logprobs": [entry and entry["logprob"] for entry in known],
        "top_logprobs": [entry and _by_name(entry, *entry["top_logprobs"], entry) for entry in known],
        "text_offset": offsets,
    }


def _by_name(*entries: dict[str, Any]) -> dict[str, float]:
    """Log-probabilities of tokens, in the order of their first entries; of two of one name the last counts."""
    return {entry["token"]: entry["logprob"] for entry in entries}
