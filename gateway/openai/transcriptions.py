"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`: the thinker writes down what is said."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import PlainTextResponse
from starlette.responses import Response

from gateway.errors import invalid
from gateway.gateway import Gateway
from gateway.json_writer import Json
from gateway.openai.connection import LAST_WORD_S, EventStream, admitted, sse, while_connected
from gateway.openai.forms import FILE, page, read_form
from gateway.openai.languages import language_of
from gateway.openai.transcript import joined, srt, vtt
from gateway.openai.transcription import Transcription, to_transcribe
from gateway.openai.transcription_requests import ServerVad, TranscriptionRequest, TranslationRequest
from gateway.strict import Strict

_PLAIN = {"text": "text/plain", "srt": "application/x-subrip", "vtt": "text/vtt"}
_SUBTITLES = {"srt": srt, "vtt": vtt}

router = APIRouter(tags=["transcriptions"])


def _page(model: type[Strict]) -> dict[str, Any]:
    answer = "Transcription, or text, or with stream transcript.text events"
    return page(model, "multipart/form-data", answer, {"file": FILE}, needed="file")


@router.post("/v1/audio/transcriptions", openapi_extra=_page(TranscriptionRequest), response_model=None)
async def transcribe(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Writes down what is said."""
    request, files = await read_form(http, TranscriptionRequest, gateway.settings.request_timeout_s, {"file"}, 1)
    language = None if request.language is None else language_of(request.language)
    if request.stream and request.response_format not in ("json", "text"):
        raise invalid("stream", "only with response_format json or text")
    if request.timestamp_granularities and request.response_format != "verbose_json":
        raise invalid("timestamp_granularities", "only with response_format verbose_json")
    work = _work(http, gateway, request, to_transcribe(language), _file(files), request.chunking_strategy)
    if request.stream:
        return EventStream(_events(work), gateway.settings.request_timeout_s + LAST_WORD_S)
    return await while_connected(http.receive, _whole(work, "transcribe", language))


@router.post("/v1/audio/translations", openapi_extra=_page(TranslationRequest), response_model=None)
async def translate(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> Response:
    """Writes down in English what is said."""
    request, files = await read_form(http, TranslationRequest, gateway.settings.request_timeout_s, {"file"}, 1)
    asked = "Listen to the provided speech and produce a translation in English text."
    work = _work(http, gateway, request, asked, _file(files), ServerVad(type="server_vad"))
    return await while_connected(http.receive, _whole(work, "translate", "English"))


def _work(
    http: Request, gateway: Gateway, request: TranslationRequest, asked: str, content: bytes, vad: ServerVad
) -> Transcription:
    return Transcription(gateway, request, asked, content, vad, http.state.request_id, http.state.log)


def _file(files: dict[str, list[bytes]]) -> bytes:
    if not files:
        raise invalid("file", "required, but missing", "missing_required_parameter")
    return files["file"][0]


async def _events(work: "Transcription") -> AsyncGenerator[bytes, None]:
    """OpenAI's events. Raises ApiError."""
    async with aclosing(work.deltas()) as deltas:
        async for delta in deltas:
            yield sse({"type": "transcript.text.delta", "delta": delta})
    yield sse({"type": "transcript.text.done", "text": joined(work.segments), "usage": work.usage})


async def _whole(work: "Transcription", task: str, language: str | None) -> Response:
    """The response in one piece. Raises ApiError."""
    async with aclosing(work.deltas()) as deltas:
        async for _ in deltas:
            pass
    text, form = joined(work.segments), work.request.response_format
    if form in _PLAIN:
        body = _SUBTITLES[form](work.segments) if form in _SUBTITLES else f"{text}\n"
        return PlainTextResponse(body, media_type=_PLAIN[form])
    if form == "json":
        return Json({"text": text, "usage": work.usage})
    body = {
        "task": task,
        "language": (language or "unknown").lower(),
        "duration": round(work.duration_s, 3),
        "text": text,
        "segments": [segment.verbose(work.request.temperature) for segment in work.segments],
        "usage": {"type": "duration", "seconds": round(work.duration_s)},
    }
    return Json(body)
