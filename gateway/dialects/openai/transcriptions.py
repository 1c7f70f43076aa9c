"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`."""

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import PlainTextResponse
from starlette.responses import Response

from gateway.answers.gateway import Gateway
from gateway.answers.transcription.audio_sources import FileSound
from gateway.answers.transcription.formats import joined, srt, vtt
from gateway.answers.transcription.languages import language_of
from gateway.answers.transcription.request import TranscriptionRequest, TranslationRequest, VadConfig
from gateway.answers.transcription.run import TranscriptionRun, transcription_prompt, translation_prompt
from gateway.errors import invalid
from gateway.http.connection import LAST_WORD_S, EventStream, admitted, sse, while_connected
from gateway.http.forms import FILE, page, read_form
from gateway.http.json_writer import Json
from gateway.validation import Strict

_PLAIN = {"text": "text/plain", "srt": "application/x-subrip", "vtt": "text/vtt"}
_SUBTITLES = {"srt": srt, "vtt": vtt}

router = APIRouter(tags=["transcriptions"])


def _page(model: type[Strict]) -> dict[str, Any]:
    answer = "Transcription, or text, or with stream transcript.text events"
    return page(model, "multipart/form-data", answer, {"file": FILE}, needed="file")


@router.post("/v1/audio/transcriptions", openapi_extra=_page(TranscriptionRequest), response_model=None)
async def transcribe(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Transcribes speech."""
    request, files = await read_form(http, TranscriptionRequest, gateway.settings.request_timeout_s, {"file"}, 1)
    language = _language(request)
    if request.timestamp_granularities and request.response_format != "verbose_json":
        raise invalid("timestamp_granularities", "only with response_format verbose_json")
    run = _work(http, gateway, request, transcription_prompt(language), _file(files), request.chunking_strategy)
    return await _respond(http, gateway, run, "transcribe", language)


@router.post("/v1/audio/translations", openapi_extra=_page(TranslationRequest), response_model=None)
async def translate(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Translates speech into English text."""
    request, files = await read_form(http, TranslationRequest, gateway.settings.request_timeout_s, {"file"}, 1)
    instruction = translation_prompt(_language(request))
    run = _work(http, gateway, request, instruction, _file(files), VadConfig(type="server_vad"))
    return await _respond(http, gateway, run, "translate", "English")


def _language(request: TranslationRequest) -> str | None:
    """English name of the audio's language. Raises ApiError."""
    return None if request.language is None else language_of(request.language)


def _work(
    http: Request, gateway: Gateway, request: TranslationRequest, instruction: str, content: bytes, vad: VadConfig
) -> TranscriptionRun:
    if request.stream and request.response_format not in ("json", "text"):
        raise invalid("stream", "only with response_format json or text")
    if len(content) > (most := gateway.fetcher.limits.media_max_bytes):
        raise invalid("file", f"is larger than {most} bytes", "invalid_media")
    sound = FileSound(content, vad.pauses, gateway.settings.request_timeout_s)
    return TranscriptionRun(gateway, request, instruction, sound, http.state.request_id, http.state.log)


def _file(files: dict[str, list[bytes]]) -> bytes:
    if not files:
        raise invalid("file", "required, but missing", "missing_required_parameter")
    return files["file"][0]


async def _respond(http: Request, gateway: Gateway, run: TranscriptionRun, task: str, language: str | None) -> Response:
    if run.request.stream:
        return EventStream(_events(run), gateway.settings.request_timeout_s + LAST_WORD_S)
    return await while_connected(http.receive, _whole(run, task, language))


async def _events(run: TranscriptionRun) -> AsyncGenerator[bytes, None]:
    """OpenAI's events; with `stream_include_usage` they are vLLM's chunks, too. Raises ApiError."""
    head = {"id": f"trsc-{uuid.uuid4().hex}", "created": int(time.time()), "model": run.request.model}
    chunked = run.request.stream_include_usage

    def encode(event: dict[str, Any]) -> bytes:
        return sse(event | head | _chunk(event) if chunked else event)

    async with aclosing(run.deltas()) as deltas:
        async for delta in deltas:
            yield encode({"type": "transcript.text.delta", "delta": delta})
    yield encode({"type": "transcript.text.done", "text": joined(run.segments), "usage": run.usage})


def _chunk(event: dict[str, Any]) -> dict[str, Any]:
    """Members that make an event a chunk of vLLM's, whose clients read `choices`, and `usage` in the last chunk."""
    chunk: dict[str, Any] = {"object": "transcription.chunk", "choices": []}
    if "delta" in event:
        chunk["choices"] = [{"index": 0, "delta": {"content": event["delta"]}, "finish_reason": None}]
    else:
        usage = event["usage"]
        counts = {"prompt_tokens": usage["input_tokens"], "completion_tokens": usage["output_tokens"]}
        chunk["usage"] = usage | counts
    return chunk


async def _whole(run: TranscriptionRun, task: str, language: str | None) -> Response:
    async with aclosing(run.deltas()) as deltas:
        async for _ in deltas:
            pass
    text, form = joined(run.segments), run.request.response_format
    if form in _PLAIN:
        body = _SUBTITLES[form](run.segments) if form in _SUBTITLES else f"{text}\n"
        return PlainTextResponse(body, media_type=_PLAIN[form])
    if form == "json":
        return Json({"text": text, "usage": run.usage})
    body = {
        "task": task,
        "language": (language or "unknown").lower(),
        "duration": round(run.sound.duration_s, 3),
        "text": text,
        "segments": [segment.verbose(run.request.temperature) for segment in run.segments],
        "usage": {"type": "duration", "seconds": round(run.sound.duration_s)},
    }
    return Json(body)
