"""`POST /v1/chat/completions`."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from gateway import metrics
from gateway.errors import from_failure
from gateway.gateway import Gateway
from gateway.media.encode import BYTES_PER_SAMPLE
from gateway.openai.answer import Answer, ChunkStream, WholeAnswers, usage
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
        exchange = ImageChat(gateway, stage, request, http.state.request_id, http.state.log)
    else:
        exchange = Exchange(gateway, request, http.state.request_id, http.state.log)
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
        request_id: names it in every stage and log line.
        log: fields of the request's log line, filled in here.
    """

    def __init__(self, gateway: Gateway, request: ChatCompletionRequest, request_id: str, log: dict[str, Any]) -> None:
        self._gateway, self._request, self._request_id, self._log = gateway, request, request_id, log
        self._arrived = time.monotonic()
        self._head = {"id": f"chatcmpl-{request_id}", "created": int(time.time()), "model": request.model}
        self._answers = [Answer(i, *gateway.transcripts.new_id()) for i in range(request.n or 1)]
        log |= {"stream": bool(request.stream), "speech": request.speaks, "answers": len(self._answers)}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events. Raises ApiError."""
        options = self._request.stream_options
        include_usage = bool(options and options.include_usage)
        chunks = ChunkStream(self._head, self._answers, bool(self._request.logprobs), include_usage)
        async with aclosing(self._events()) as events:
            async for index, event in events:
                for chunk in chunks.chunks(index, event):
                    yield sse(chunk)
        if include_usage:
            yield sse(chunks.usage())
        yield DONE

    async def whole(self) -> Response:
        """The response in one piece. Raises ApiError."""
        whole = WholeAnswers(self._head, self._answers, bool(self._request.logprobs), self._request.audio_format)
        async with aclosing(self._events()) as events:
            async for index, event in events:
                whole.take(index, event)
        return JSONResponse(await whole.response())

    async def _events(self) -> AsyncGenerator[tuple[int, Event], None]:
        try:
            jobs = await to_jobs(self._gateway, self._request, self._request_id)
            left_s = max(0.0, self._gateway.settings.request_timeout_s - self._elapsed_s())
            async with aclosing(run(self._gateway.pipeline, jobs, left_s)) as events:
                async for index, event in events:
                    self._answers[index].take(event)
                    self._observe(event)
                    yield index, event
        except StageFailure as failure:
            raise from_failure(failure) from failure
        self._finish()

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._arrived

    def _observe(self, event: Event) -> None:
        if isinstance(event, TextDelta) and event.delta.token_ids and "ttft_ms" not in self._log:
            metrics.TTFT.observe(self._elapsed_s())
            self._log["ttft_ms"] = round(self._elapsed_s() * 1000, 1)
        elif isinstance(event, AudioDelta) and "ttfa_ms" not in self._log:
            metrics.TTFA.observe(self._elapsed_s())
            self._log["ttfa_ms"] = round(self._elapsed_s() * 1000, 1)

    def _finish(self) -> None:
        """Remembers what was said, and counts."""
        for answer in self._answers:
            if answer.audio_bytes:
                self._gateway.transcripts.put(answer.audio_id, answer.expires_at, answer.text)
                audio_s = answer.audio_bytes / BYTES_PER_SAMPLE / answer.sample_rate_hz
                metrics.AUDIO_SECONDS.inc(audio_s)
                metrics.RTF.observe(self._elapsed_s() / audio_s)
        tokens = usage(self._answers)
        details = tokens["completion_tokens_details"]
        metrics.PROMPT_TOKENS.inc(tokens["prompt_tokens"])
        metrics.TEXT_TOKENS.inc(details["text_tokens"])
        self._log |= {
            "prompt_tokens": tokens["prompt_tokens"],
            "text_tokens": details["text_tokens"],
            "frames": details["audio_tokens"],
        }
