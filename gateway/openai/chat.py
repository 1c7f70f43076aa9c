"""`POST /v1/chat/completions`."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from starlette.datastructures import State
from starlette.responses import Response

from gateway import metrics
from gateway.errors import from_failure
from gateway.gateway import Gateway
from gateway.media.encode import BYTES_PER_SAMPLE
from gateway.openai.answer import Answer, StreamedAnswer, WholeAnswer, usage
from gateway.openai.chat_requests import to_jobs
from gateway.openai.connection import DONE, LAST_WORD_S, EventStream, admitted, sse, while_connected
from gateway.openai.forms import page, read_json
from gateway.openai.image_chat import ImageChat
from gateway.openai.schema import ChatCompletionRequest
from gateway.pipeline.job import AudioDelta, Event, StageFailure, TextDelta
from gateway.pipeline.kinds import KINDS
from gateway.pipeline.run import run
from gateway.pipeline.stage import Stage

router = APIRouter(tags=["chat"])
AnswerKind = TypeVar("AnswerKind", bound=Answer)

_OPENAPI = page(
    ChatCompletionRequest,
    "application/json",
    "chat.completion, or with stream: true chat.completion.chunk events and [DONE]",
)


@router.post("/v1/chat/completions", openapi_extra=_OPENAPI, response_model=None)
async def chat_completions(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Answers a conversation with text and, if asked for, speech; or with pictures, if that is what the model makes."""
    limit_s = gateway.settings.request_timeout_s
    request = await read_json(http, ChatCompletionRequest, limit_s)
    stage = _stage(gateway, request.model)
    if KINDS[stage.kind].is_diffusion:
        exchange = ImageChat(gateway, stage, request, http.state)
    else:
        exchange = Exchange(gateway, request, http.state)
    if request.stream:
        return EventStream(exchange.stream(), limit_s + LAST_WORD_S)
    return await while_connected(http.receive, exchange.whole())


def _stage(gateway: Gateway, model: str) -> Stage:
    """The stage whose model answers as `model`: it writes, speaks, or makes images. Raises ApiError."""
    answer, image = gateway.pipeline.answer, gateway.pipeline.output("image")
    if image is not None and (not answer or gateway.models.get(model) is image):
        gateway.require_model(model, image)
        return image
    return gateway.stage_for("text" if gateway.pipeline.config.outputs.speech is None else "speech", model)


class Exchange:
    """One chat request and its response.

    Args:
        gateway: the gateway.
        request: the request, valid by itself.
        state: its id, and the fields of its log line, filled in here.
    """

    def __init__(self, gateway: Gateway, request: ChatCompletionRequest, state: State) -> None:
        self._gateway, self._request, self._request_id, self._log = gateway, request, state.request_id, state.log
        self._arrived = time.monotonic()
        self._head = {"id": f"chatcmpl-{self._request_id}", "created": int(time.time()), "model": request.model}
        self._log |= {"stream": bool(request.stream), "speech": request.speaks, "answers": request.n or 1}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events. Raises ApiError."""
        options, answers = self._request.stream_options, self._new(StreamedAnswer)
        include_usage = bool(options and options.include_usage)
        head = self._head | {"object": "chat.completion.chunk"}
        if include_usage:  # every chunk has the key, and a last one the numbers
            head["usage"] = None
        async with aclosing(self._events(answers)) as events:
            async for index, event in events:
                for chunk in answers[index].chunks(event):
                    yield sse(head | chunk)
        if include_usage:
            yield sse(head | {"choices": [], "modality": "text", "usage": usage(answers)})
        yield DONE

    async def whole(self) -> Response:
        """The response in one piece. Raises ApiError."""
        answers = self._new(WholeAnswer)
        async with aclosing(self._events(answers)) as events:
            async for _ in events:
                pass
        body = self._head | {
            "object": "chat.completion",
            "choices": [
                await answer.choice(self._request.audio_format, bool(self._request.logprobs))
                | ({"quartet": answer.quartet()} if len(answers) > 1 else {})
                for answer in answers
            ],
            "usage": usage(answers),
            "modality": "audio" if any(answer.samples for answer in answers) else "text",
            "quartet": answers[0].quartet(),
        }
        return JSONResponse(body)

    def _new(self, kind: type[AnswerKind]) -> list[AnswerKind]:
        return [kind(i, *self._gateway.transcripts.new_id()) for i in range(self._request.n or 1)]

    async def _events(self, answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, Event], None]:
        """What happens, as it does; the answers have taken it. Raises ApiError."""
        try:
            jobs = await to_jobs(self._gateway, self._request, self._request_id)
            left_s = max(0.0, self._gateway.settings.request_timeout_s - self._elapsed_s())
            async with aclosing(run(self._gateway.pipeline, jobs, left_s)) as events:
                async for index, event in events:
                    answers[index].take(event)
                    self._observe(event)
                    yield index, event
        except StageFailure as failure:
            raise from_failure(failure) from failure
        self._finish(answers)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._arrived

    def _observe(self, event: Event) -> None:
        if isinstance(event, TextDelta) and event.delta.token_ids and "ttft_ms" not in self._log:
            metrics.TTFT.observe(self._elapsed_s())
            self._log["ttft_ms"] = round(self._elapsed_s() * 1000, 1)
        elif isinstance(event, AudioDelta) and "ttfa_ms" not in self._log:
            metrics.TTFA.observe(self._elapsed_s())
            self._log["ttfa_ms"] = round(self._elapsed_s() * 1000, 1)

    def _finish(self, answers: Sequence[Answer]) -> None:
        """Remembers what was said, and counts."""
        for answer in answers:
            if answer.audio_bytes:
                self._gateway.transcripts.put(answer.audio_id, answer.expires_at, answer.text)
                audio_s = answer.audio_bytes / BYTES_PER_SAMPLE / answer.sample_rate_hz
                metrics.AUDIO_SECONDS.inc(audio_s)
                metrics.RTF.observe(self._elapsed_s() / audio_s)
        tokens = usage(answers)
        details = tokens["completion_tokens_details"]
        metrics.PROMPT_TOKENS.inc(tokens["prompt_tokens"])
        metrics.TEXT_TOKENS.inc(details["text_tokens"])
        self._log |= {
            "prompt_tokens": tokens["prompt_tokens"],
            "text_tokens": details["text_tokens"],
            "frames": details["audio_tokens"],
        }
