"""`POST /inference/v1/generate`: token ids and media in, token ids out, in vLLM's shape; and its cancellation."""

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from gateway.answers.answer import LEAST_LOGPROB, WholeAnswer, prompt_logprobs
from gateway.answers.completion import CompletionRun, RawSpeech, SpeechParams, Step
from gateway.answers.conversation import MediaPart
from gateway.answers.gateway import Gateway
from gateway.answers.jobs import Pending, attach_media, media_file
from gateway.answers.request import StreamOptions, WriterSampling
from gateway.errors import invalid
from gateway.http.connection import DONE, admitted, counted, drain, owner_of, respond, sse
from gateway.http.forms import page, read_json
from gateway.http.json_writer import Json
from gateway.pipeline.events import PromptTokens, TextDelta
from gateway.validation import Listed, Strict, TokenIds
from quartet.v1 import thinker_pb2

router = APIRouter(tags=["completions"])
Result = TypeVar("Result")


class SamplingParams(WriterSampling):
    """Sampling parameters under vLLM's names."""

    n: Annotated[int, Field(ge=1, le=128)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(default=None, description="alternatives of each token")
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        default=None, description="alternatives of each of the prompt's tokens; not in a stream"
    )
    detokenize: bool | None = Field(default=None, description="accepted; ids are told, or the text of output_mode")


class GenerateRequest(Strict):
    """Token ids, with a placeholder for each medium."""

    token_ids: TokenIds = Field(min_length=1)
    sampling_params: SamplingParams = SamplingParams()
    model: str | None = Field(default=None, description="default: the one that writes")
    request_id: str | None = Field(default=None, min_length=1, max_length=128, description="by which it is given up")
    content_parts: Listed[Annotated[MediaPart, Field(discriminator="type")]] | None = Field(
        default=None, description="media, as parts of chats, in the order of their placeholders"
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    output_mode: Literal["tokens", "text"] | None = Field(default=None, description="text: choices have it, too")
    return_token_ids: bool | None = Field(default=None, description="the prompt's ids are told, placeholders as sent")
    speech: SpeechParams | None = Field(default=None, description="what is written is spoken, too; Quartet's own")
    cache_salt: Any = Field(default=None, description="refused: prompts share one prefix cache")
    features: Any = Field(default=None, description="refused: send media as content_parts")
    kv_transfer_params: Any = Field(default=None, description="refused")

    def check(self, gateway: Gateway) -> None:
        """Raises ApiError: 400 naming a member that is not supported."""
        if self.features is not None:
            raise invalid("features", "media that were processed elsewhere are not taken; send them as content_parts")
        if self.kv_transfer_params is not None:
            raise invalid("kv_transfer_params", "KV blocks do not come from elsewhere; leave it out")
        if self.cache_salt is not None:
            raise invalid("cache_salt", "all prompts share one prefix cache; leave it out")
        if self.sampling_params.prompt_logprobs is not None and self.stream:
            raise invalid("sampling_params.prompt_logprobs", "a stream does not tell them; set stream to false")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "only with stream: true")
        if self.speech is not None:
            self.speech.check(gateway, bool(self.stream))


class AbortRequest(Strict):
    request_ids: Listed[str] = Field(min_length=1, max_length=1000)


# Running requests that can be cancelled, by owner and id; a cancellation ends the future.
Aborts = dict[tuple[str | None, str], "asyncio.Future[None]"]


@contextmanager
def _abortable(aborts: Aborts, owner: str | None, request_id: str) -> Iterator["asyncio.Future[None]"]:
    """Raises ApiError: 400, the id is in use."""
    if (owner, request_id) in aborts:
        raise invalid("request_id", f"a request {request_id[:80]!r} is running; take another id")
    aborts[owner, request_id] = aborted = asyncio.get_running_loop().create_future()
    try:
        yield aborted
    finally:
        del aborts[owner, request_id]


_OPENAPI = page(GenerateRequest, "as vLLM's, or with stream: true its chunks")


@router.post("/inference/v1/generate", openapi_extra=_OPENAPI)
async def generate(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Continues token ids with token ids."""
    request = await read_json(http, GenerateRequest)
    request.check(gateway)
    prompt, media = await _prompt(gateway, request)
    return await respond(http, Generation(gateway, request, http, prompt, media), request.stream)


@router.post("/inference/v1/abort_requests", dependencies=[Depends(counted)], openapi_extra=page(AbortRequest, "{}"))
async def abort_requests(http: Request) -> dict[str, Any]:
    """Cancels running requests of the same API key."""
    request = await read_json(http, AbortRequest)
    for request_id in request.request_ids:
        aborted = http.app.state.generations.get((owner_of(http), request_id))
        if aborted is not None and not aborted.done():
            aborted.set_result(None)
    return {}


async def _prompt(gateway: Gateway, request: GenerateRequest) -> tuple[thinker_pb2.RawPrompt, list[bytes]]:
    prompt = thinker_pb2.RawPrompt(token_ids=thinker_pb2.TokenIds(ids=request.token_ids))
    pending: list[Pending] = []
    for i, part in enumerate(request.content_parts or ()):
        file = media_file(part, f"content_parts[{i}]")
        media = prompt.media.add(kind=f"MEDIA_KIND_{file.kind.upper()}", field=file.field)
        pending.append((media, file))
    return prompt, await attach_media(gateway, pending)


class Generation:
    def __init__(
        self,
        gateway: Gateway,
        request: GenerateRequest,
        http: Request,
        prompt: thinker_pb2.RawPrompt,
        media: list[bytes],
    ) -> None:
        sampling = request.sampling_params
        if request.priority is not None:
            sampling.priority = request.priority
        self._request, self._sampling = request, sampling
        self._id, self._owner = request.request_id or http.state.request_id, owner_of(http)
        self._aborts: Aborts = http.app.state.generations
        params, count = request.speech, sampling.n or 1
        speech = None if params is None else RawSpeech(gateway, params, sampling.seed, bool(request.stream))
        model = gateway.catalog.meant(request.model)
        self._run = CompletionRun(
            gateway, sampling, http.state, [prompt], model, count, "token_ids", media=media, speech=speech
        )
        self._logprobs: list[list[dict[str, Any]]] = [[] for _ in self._run.answers]

    async def _steps(self) -> AsyncGenerator[Step, None]:
        """Yields samples until the request ends or is cancelled."""
        logprobs = self._sampling.logprobs, self._sampling.prompt_logprobs
        with _abortable(self._aborts, self._owner, self._id) as aborted:
            async with aclosing(self._run.events(*logprobs)) as events:
                while (step := await _unless(aborted, anext(events, None))) is not None:
                    answer, new = step
                    if isinstance(new, TextDelta):
                        self._logprobs[answer.index] += map(_logprob, new.delta.logprobs)
                    yield step
        for answer in self._run.answers:
            if not answer.has_ended:
                yield answer, None

    async def whole(self) -> Response:
        await drain(self._steps())
        body = self._head() | {"choices": [], "usage": self._run.usage()}
        for answer in self._run.answers:
            choice = self._choice(answer, 0, answer.text, has_ended=True)
            if self._run.speech is not None:
                choice["speech"] = await self._run.speech.whole(answer)
            body["choices"].append(choice)
        if self._sampling.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(self._run.answers[0].prompt_tokens)
        return Json(body)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        options, head = self._request.stream_options or StreamOptions(), self._head()
        returned = [0] * len(self._run.answers)  # tokens
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
                    yield sse(head | {"choices": [choice]})
        if options.include_usage:
            yield sse(head | {"choices": [], "usage": self._run.usage()})
        yield DONE

    def _head(self) -> dict[str, Any]:
        mode = self._request.output_mode or "tokens"
        head: dict[str, Any] = {"request_id": self._id, "created": int(time.time()), "output_mode": mode}
        if self._run.speech is not None:
            head["speech"] = self._run.speech.facts()
        return head | ({"prompt_token_ids": self._request.token_ids} if self._request.return_token_ids else {})

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


def _logprob(token: thinker_pb2.TokenLogprob) -> dict[str, Any]:
    """As vLLM: among the alternatives is always the token itself."""
    tops = list(token.top)
    if token.token_id not in {other.token_id for other in tops}:
        tops.append(token)
    return _entry(token) | {"top_logprobs": [_entry(other) | {"top_logprobs": []} for other in tops]}


def _entry(token: thinker_pb2.TokenLogprob) -> dict[str, Any]:
    return {"token_id": token.token_id, "logprob": max(token.logprob, LEAST_LOGPROB), "rank": token.rank}
