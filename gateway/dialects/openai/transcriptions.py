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
from gateway.answers.transcription.request import TranscriptionRequest, TranslationRequest
from gateway.answers.transcription.run import TranscriptionRun
from gateway.dialects.openai.sounds_in_json import IN_JSON
from gateway.errors import invalid
from gateway.http.connection import EventStream, admitted, drain, key_of, owner_of, sse, while_connected
from gateway.http.forms import FILE, is_json, page, read_form, read_json
from gateway.http.json_writer import Json

_PLAIN = {"text": "text/plain", "srt": "application/x-subrip", "vtt": "text/vtt"}
_SUBTITLES = {"srt": srt, "vtt": vtt}

router = APIRouter(tags=["transcriptions"])


def _page(model: type[TranslationRequest]) -> dict[str, Any]:
    answer = "Transcription, or text, or with stream transcript.text events"
    described = page(model, answer, {"file": FILE}, needed="file", media_type="multipart/form-data")
    in_json = page(IN_JSON[model], answer)["requestBody"]["content"]
    described["requestBody"]["content"] |= in_json
    return described


@router.post("/v1/audio/transcriptions", openapi_extra=_page(TranscriptionRequest))
async def transcribe(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Transcribes speech."""
    return await _respond(http, gateway, TranscriptionRequest)


@router.post("/v1/audio/translations", openapi_extra=_page(TranslationRequest))
async def translate(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Translates speech into English text."""
    return await _respond(http, gateway, TranslationRequest)


async def _respond(http: Request, gateway: Gateway, model: type[TranslationRequest]) -> Response:
    limit_s = gateway.settings.request_timeout_s
    request, content = await _read(http, gateway, model)
    most_s, sounds = gateway.settings.max_transcription_s, gateway.fetcher.decoding.sounds
    sound = FileSound(sounds, content, request.pauses, limit_s, most_s, owner_of(http))
    run = TranscriptionRun(gateway, request, sound, http.state.request_id, http.state.log, key_of(http))
    if request.stream:
        return EventStream(_events(run), limit_s)
    return await while_connected(http.receive, _whole(run))


async def _read(http: Request, gateway: Gateway, model: type[TranslationRequest]) -> tuple[TranslationRequest, bytes]:
    """The request and its file. Raises ApiError."""
    if is_json(http):
        in_json = await read_json(http, IN_JSON[model])
        in_json.check()
        return in_json, await in_json.read(gateway, owner_of(http))
    request, files = await read_form(http, model, {"file"}, 1)
    request.check()
    if not files:
        raise invalid("file", "required, but missing", "missing_required_parameter")
    (content,) = files["file"]
    if len(content) > (most := gateway.fetcher.limits.media_max_bytes):
        raise invalid("file", f"is larger than {most} bytes", "invalid_media")
    return request, content


async def _events(run: TranscriptionRun) -> AsyncGenerator[bytes, None]:
    """OpenAI's events; with `stream_include_usage` they are vLLM's chunks, too. Raises ApiError."""
    head = {"id": f"trsc-{uuid.uuid4().hex}", "created": int(time.time()), "model": run.request.model}
    request = run.request

    def encode(event: dict[str, Any]) -> bytes:
        if not request.stream_include_usage:
            return sse(event)
        return sse(event | head | _chunk(event, run.usage if request.stream_continuous_usage_stats else None))

    async with aclosing(run.deltas()) as deltas:
        async for delta in deltas:
            yield encode({"type": "transcript.text.delta", "delta": delta})
    yield encode({"type": "transcript.text.done", "text": joined(run.segments), "usage": run.usage})


def _chunk(event: dict[str, Any], usage: dict[str, Any] | None) -> dict[str, Any]:
    """Members that make an event a chunk of vLLM's, whose clients read `choices` and `usage`: the last event's, or
    the `usage` so far."""
    chunk: dict[str, Any] = {"object": "transcription.chunk", "choices": []}
    if "delta" in event:
        chunk["choices"] = [{"index": 0, "delta": {"content": event["delta"]}, "finish_reason": None}]
    if usage := event.get("usage", usage):
        counts = {"prompt_tokens": usage["input_tokens"], "completion_tokens": usage["output_tokens"]}
        chunk["usage"] = usage | counts
    return chunk


async def _whole(run: TranscriptionRun) -> Response:
    await drain(run.deltas())
    text, form = joined(run.segments), run.request.response_format
    if form in _PLAIN:
        body = _SUBTITLES[form](run.segments) if form in _SUBTITLES else f"{text}\n"
        return PlainTextResponse(body, media_type=_PLAIN[form])
    if form == "json":
        return Json({"text": text, "usage": run.usage})
    body = {
        "task": run.request.task,
        "language": run.request.text_language,
        "duration": round(run.sound.duration_s, 3),
        "text": text,
    }
    if run.request.wants_words:
        body["words"] = [word.verbose() for segment in run.segments for word in segment.words]
    if run.request.wants_segments:
        body["segments"] = [segment.verbose(run.request.temperature) for segment in run.segments]
    return Json(body | {"usage": {"type": "duration", "seconds": round(run.sound.duration_s)}})
