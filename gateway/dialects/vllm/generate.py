"""`POST /inference/v1/generate`: token ids and media in, token ids out, in vLLM's shape; and its cancellation."""

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from io import BytesIO
from typing import Annotated, Any, TypeVar

import numpy as np
import pybase64
from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from gateway.answers.answer import LEAST_LOGPROB, WholeAnswer, prompt_logprobs
from gateway.answers.completion import CompletionRun, RawSpeech, Step
from gateway.answers.gateway import Gateway
from gateway.answers.prompt_messages import attach, media_file
from gateway.answers.rendering import placeholders
from gateway.answers.request import StreamOptions
from gateway.dialects.vllm.aborts import Aborts
from gateway.dialects.vllm.request import GenerateRequest
from gateway.errors import invalid
from gateway.http.connection import DONE, admitted, counted, drain, owner_of, respond, sse
from gateway.http.forms import page, read_json
from gateway.http.json_writer import Json
from gateway.media.check import load_media
from gateway.pipeline.events import PromptTokens, TextDelta
from gateway.validation import Listed, Strict
from quartet.v1 import thinker_pb2

router = APIRouter(tags=["completions"])
Result = TypeVar("Result")


class AbortRequest(Strict):
    request_ids: Listed[str] = Field(min_length=1, max_length=1000)


_OPENAPI = page(GenerateRequest, "as vLLM's, or with stream: true its chunks")


@router.post("/inference/v1/generate", openapi_extra=_OPENAPI)
async def generate(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Continues token ids with token ids."""
    request = await read_json(http, GenerateRequest)
    request.check(gateway)
    owner, params, seed = owner_of(http), request.speech, request.sampling_params.seed
    prompt, media = await _prompt(gateway, request, owner)
    speech = None if params is None else await RawSpeech.begin(gateway, params, seed, bool(request.stream), owner)
    return await respond(http, Generation(gateway, request, http, prompt, media, speech), request.stream)


@router.post("/inference/v1/abort_requests", dependencies=[Depends(counted)], openapi_extra=page(AbortRequest, "{}"))
async def abort_requests(http: Request) -> dict[str, Any]:
    """Cancels running requests of the same API key."""
    request = await read_json(http, AbortRequest)
    await http.app.state.aborts.abort(owner_of(http), request.request_ids)
    return {}


async def _prompt(
    gateway: Gateway, request: GenerateRequest, owner: str | None
) -> tuple[thinker_pb2.RawPrompt, list[bytes]]:
    if request.features is not None:
        ids, files = request.features.collapsed(request.token_ids, "features")
    else:
        parts = enumerate(request.content_parts or ())
        ids, files = request.token_ids, [media_file(part, f"content_parts[{i}]", owner) for i, part in parts]
    opens_thought = request.reasoning_ended is False
    prompt = thinker_pb2.RawPrompt(token_ids=thinker_pb2.TokenIds(ids=ids), opens_thought=opens_thought)
    media = [prompt.media.add(kind=f"MEDIA_KIND_{file.kind.upper()}", field=file.field) for file in files]
    await load_media(gateway.fetcher, files)
    return prompt, attach([(each, file.content) for each, file in zip(media, files, strict=True)])


class Generation:
    def __init__(
        self,
        gateway: Gateway,
        request: GenerateRequest,
        http: Request,
        prompt: thinker_pb2.RawPrompt,
        media: list[bytes],
        speech: RawSpeech | None,
    ) -> None:
        sampling = request.sampling_params
        if request.priority is not None:
            sampling.priority = request.priority
        self._request, self._sampling = request, sampling
        self._id, self._owner = request.request_id or http.state.request_id, owner_of(http)
        self._aborts: Aborts = http.app.state.aborts
        model, count = gateway.catalog.meant(request.model), sampling.n or 1
        self._run = CompletionRun(
            gateway, sampling, http.state, [prompt], model, count, "token_ids", media=media, speech=speech
        )
        self._run.choose = sampling.fill_chosen
        self._run.wants_prompt_ids = bool(request.return_token_ids or request.features)
        self._logprobs: list[list[dict[str, Any]]] = [[] for _ in self._run.answers]

    async def _steps(self) -> AsyncGenerator[Step, None]:
        """Yields samples until the request ends or is cancelled."""
        logprobs = self._sampling.logprobs, self._sampling.prompt_logprobs
        with self._aborts.running(self._owner, self._id) as aborted:
            is_read = False
            async with aclosing(self._run.events(*logprobs)) as events:
                while (step := await _unless(aborted, anext(events, None))) is not None:
                    answer, new = step
                    is_read = is_read or self._check_read(answer.prompt)
                    if isinstance(new, TextDelta):
                        self._logprobs[answer.index] += map(_logprob, new.delta.logprobs)
                    yield step
        for answer in self._run.answers:
            if not answer.has_ended:
                yield answer, None

    def _check_read(self, read: thinker_pb2.PromptInfo) -> bool:
        """Raises ApiError: 400, the media of `features` have other numbers of tokens here."""
        if self._request.features is not None and read.token_ids != self._request.token_ids:
            raise invalid("token_ids", "are not what the model reads of these media: send what /render answers now")
        return True

    def _prompt(self, read: thinker_pb2.PromptInfo) -> dict[str, Any]:
        if not self._request.return_token_ids:
            return {}
        return {"prompt_token_ids": list(read.token_ids), "mm_placeholders": placeholders(read)}

    async def whole(self) -> Response:
        await drain(self._steps())
        head = self._head() | self._prompt(self._run.answers[0].prompt)
        body = head | {"choices": [], "usage": self._run.usage()}
        for answer in self._run.answers:
            choice = self._choice(answer, 0, answer.text, has_ended=True)
            if self._run.speech is not None:
                choice["speech"] = await self._run.speech.whole(answer)
            body["choices"].append(choice)
        if self._sampling.prompt_logprobs is not None:
            body["prompt_logprobs"] = await asyncio.to_thread(prompt_logprobs, self._run.answers[0].prompt_tokens)
        if (scores := self._run.answers[0].prompt_scores) is not None:
            body["prompt_token_id_logprobs"] = await asyncio.to_thread(_npy, scores)
        return Json(body)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        options, head = self._request.stream_options or StreamOptions(), self._head()
        returned = [0] * len(self._run.answers)  # tokens
        is_first = True
        async with aclosing(self._steps()) as steps:
            async for answer, new in steps:
                text = new.delta.text if isinstance(new, TextDelta) else ""
                choice = self._choice(answer, returned[answer.index], text, new is None)
                returned[answer.index] = len(answer.token_ids)
                if self._run.speech is not None and not isinstance(new, TextDelta | PromptTokens):
                    choice["speech"] = self._run.speech.end(answer) if new is None else self._run.speech.delta(new)
                if options.include_usage and options.continuous_usage_stats:
                    head["usage"] = self._run.usage()
                if choice["token_ids"] or "speech" in choice or new is None:
                    yield sse(head | (self._prompt(answer.prompt) if is_first else {}) | {"choices": [choice]})
                    is_first = False
        if options.include_usage:
            yield sse(head | {"choices": [], "usage": self._run.usage()})
        yield DONE

    def _head(self) -> dict[str, Any]:
        mode = self._request.output_mode or "tokens"
        head: dict[str, Any] = {"request_id": self._id, "created": int(time.time()), "output_mode": mode}
        if self._run.speech is not None:
            head["speech"] = self._run.speech.facts()
        return head

    def _choice(self, answer: WholeAnswer, begin: int, text: str, has_ended: bool) -> dict[str, Any]:
        """The choice from its `begin`th token on."""
        wants_logprobs = self._sampling.logprobs is not None
        reason = answer.finish_reason if answer.has_ended else "abort"
        return {
            "index": answer.index,
            "token_ids": answer.token_ids[begin:],
            "logprobs": {"content": self._logprobs[answer.index][begin:]} if wants_logprobs else None,
            "finish_reason": reason if has_ended else None,
            **({"text": text} if self._request.output_mode == "text" else {}),
        }


async def _unless(stop: "asyncio.Future[Any]", work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of `work`; None if `stop` is done first, which cancels it."""
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait((working, stop), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


def _npy(scores: thinker_pb2.PromptScores) -> str:
    """vLLM's form: numpy's file of a (rows, ids of a row) float32 array, in base64."""
    file = BytesIO()
    np.save(file, np.asarray(scores.logprobs, dtype=np.float32).reshape(-1, scores.columns))
    return pybase64.b64encode_as_string(file.getvalue())


def _logprob(token: thinker_pb2.TokenLogprob) -> dict[str, Any]:
    """As vLLM: among the alternatives is always the token itself."""
    tops = list(token.top)
    if token.token_id not in {other.token_id for other in tops}:
        tops.append(token)
    return _entry(token) | {"top_logprobs": [_entry(other) | {"top_logprobs": []} for other in tops]}


def _entry(token: thinker_pb2.TokenLogprob) -> dict[str, Any]:
    return {"token_id": token.token_id, "logprob": max(token.logprob, LEAST_LOGPROB), "rank": token.rank}
