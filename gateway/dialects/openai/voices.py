"""`/v1/audio/voices`: the model's voices, and uploaded ones that the talker imitates."""

import asyncio
import re
import time
import uuid
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import AfterValidator, Field

from gateway.answers.gateway import Gateway
from gateway.answers.voice_options import MAX_SAMPLE_TEXT_CHARACTERS
from gateway.answers.voice_store import UploadedVoice
from gateway.errors import ApiError, invalid
from gateway.http.connection import admitted, key_of, owner_of
from gateway.http.forms import FILE, JSON, page, read_form
from gateway.media.fetch import media_errors
from gateway.media.voice_sample import as_flac, read_sample
from gateway.store.columns import fits
from gateway.validation import Strict
from services.common.text import match_case

router = APIRouter(tags=["speech"])


def _name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise ValueError("must be 1 to 64 letters of A to Z, digits, or . _ -")
    return name


def _words(text: str) -> str:
    if not text.strip() or len(text) > MAX_SAMPLE_TEXT_CHARACTERS:
        raise ValueError(f"must have 1 to {MAX_SAMPLE_TEXT_CHARACTERS} characters")
    if not fits(text):
        raise ValueError("must not have the character U+0000; leave it out")
    return text.strip()


class VoiceRequest(Strict):
    """A voice to be imitated: OpenAI's fields, and vLLM-Omni's `ref_text`."""

    name: Annotated[str, AfterValidator(_name)] = Field(description="1 to 64 letters, digits or . _ -, in any case")
    consent: Annotated[str, AfterValidator(_words)] = Field(description="who agreed to it: an id or a text; it is kept")
    ref_text: Annotated[str, AfterValidator(_words)] | None = Field(default=None, description="what the sample says")
    type: Literal["audio_sample"] = "audio_sample"
    audio_sample: None = Field(default=None, description="a file of sound, 1 to 30 s of one voice, at most 10 MiB")


_OPENAPI = page(
    VoiceRequest, "the new voice", {"audio_sample": FILE}, "audio_sample", JSON, media_type="multipart/form-data"
)


@router.get("/v1/audio/voices")
async def list_voices(http: Request) -> dict[str, Any]:
    """The talker's voices, the default first, and then those uploaded with the API key, if there is one."""
    gateway: Gateway = http.app.state.gateway
    names = gateway.pipeline.voices
    data = [{"id": name, "name": name, "object": "audio.voice", "default": i == 0} for i, name in enumerate(names)]
    uploaded: list[dict[str, Any]] = []
    talker, has_keys = gateway.pipeline.info("talker"), gateway.settings.api_keys_file is not None
    if talker is not None and talker.voice_sample_rate_hz and (key_of(http) is not None or not has_keys):
        uploaded = [_object(voice) for voice in await gateway.voices.all_of(owner_of(http))]
    data += [{**voice, "default": False} for voice in uploaded]
    return {
        "object": "list",
        "voices": [{"id": voice["id"], "name": voice["name"]} for voice in data],
        "data": data,
        "uploaded_voices": uploaded,
    }


@router.get("/v1/audio/models")
async def list_speech_models(http: Request) -> dict[str, Any]:
    """The model that speaks a given text, for clients that look here."""
    gateway: Gateway = http.app.state.gateway
    talker, name = gateway.pipeline.info("talker"), gateway.catalog.meant(None, "speech")
    speaks = name is not None and talker is not None and talker.reads_text
    return {"models": [{"id": name, "name": name}] if speaks else []}


@router.post("/v1/audio/voices", openapi_extra=_OPENAPI)
async def create_voice(http: Request, gateway: Annotated[Gateway, Depends(admitted)]) -> dict[str, Any]:
    """Uploads a voice, which speech can then name or identify."""
    rate_hz = _require_cloning(gateway)
    request, files = await read_form(http, VoiceRequest, {"audio_sample"}, 1)
    if not files:
        raise invalid("audio_sample", "required: a file of sound", "missing_required_parameter")
    if match_case(request.name, gateway.pipeline.voices) is not None:
        raise invalid("name", f"{request.name!r} is a voice of the model; choose another name")
    with media_errors("audio_sample"):
        samples = await gateway.fetcher.decoding.run(read_sample, files["audio_sample"][0], rate_hz)
    voice = UploadedVoice(
        id=f"voice_{uuid.uuid4().hex}",
        name=request.name,
        consent=request.consent,
        text=request.ref_text or "",
        seconds=len(samples) / rate_hz,
        created_at=int(time.time()),
        owner=owner_of(http),
    )
    flac = await asyncio.to_thread(as_flac, samples, rate_hz)
    await gateway.voices.add(voice, flac)
    http.state.log |= {"voice": voice.id, "voice_sample_s": round(voice.seconds, 2)}
    return {**_object(voice), "success": True, "voice": _object(voice)}


@router.delete("/v1/audio/voices/{voice}")
async def delete_voice(http: Request, voice: str) -> dict[str, Any]:
    """Removes an uploaded voice by id or name, and its sample."""
    gateway: Gateway = http.app.state.gateway
    _require_cloning(gateway)
    found = await gateway.voices.find(voice, owner_of(http))
    if found is None:
        builtin = match_case(voice, gateway.pipeline.voices)
        why = "it is the model's own" if builtin is not None else "GET /v1/audio/voices lists those of this gateway"
        raise ApiError(404, f"no uploaded voice {voice!r}; {why}", "voice", "not_found")
    await gateway.voices.remove(found)
    http.state.log["voice"] = found.id
    return {"id": found.id, "name": found.name, "object": "audio.voice.deleted", "deleted": True, "success": True}


def _require_cloning(gateway: Gateway) -> int:
    """Rate of voice samples. Raises ApiError: 501, nothing imitates voices; 503, not known yet."""
    stage = gateway.pipeline.output("speech")
    rate_hz = 0 if stage is None else gateway.catalog.info("talker").voice_sample_rate_hz
    if not rate_hz:
        what = "this model imitates no voices: it has its own" if stage else "nothing here speaks"
        message = f"{what}; GET /v1/audio/voices lists them" if stage else what
        raise ApiError(501, message, None, "voice_cloning_unsupported")
    return rate_hz


def _object(voice: UploadedVoice) -> dict[str, Any]:
    return {
        "id": voice.id,
        "object": "audio.voice",
        "name": voice.name,
        "type": "audio_sample",
        "created_at": voice.created_at,
        "consent": voice.consent,
        "ref_text": voice.text or None,
        "seconds": round(voice.seconds, 3),
    }
