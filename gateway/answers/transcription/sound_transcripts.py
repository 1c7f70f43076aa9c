"""Sounds for a thinker that does not hear: another model writes down what is said in them, and it reads that."""

import hashlib
from collections.abc import Sequence
from contextlib import aclosing

from gateway.answers.gateway import Gateway
from gateway.answers.transcription.audio_sources import FileSound
from gateway.answers.transcription.formats import joined
from gateway.answers.transcription.request import TranscriptionRequest
from gateway.answers.transcription.run import TranscriptionRun
from gateway.listening.speech_windows import Pauses
from gateway.media.check import MediaFile
from gateway.media.kept import MediaName

_TRANSCRIPT = "transcript"  # the kind by which those that are kept differ from media


def hears(gateway: Gateway) -> bool:
    """Whether the thinker is sent sounds: it hears, or nothing else here does, and it refuses them."""
    thinker = gateway.pipeline.info("thinker")
    return not gateway.pipeline.transcript or thinker is None or "audio" in thinker.input_modalities


def model_that_hears(gateway: Gateway) -> str:
    """Its name, whatever model a client asks for; "" if none is known."""
    stage = gateway.catalog.transcriber
    return (stage and gateway.catalog.model_of(stage)) or ""


async def transcripts_of(gateway: Gateway, files: Sequence[MediaFile], request_id: str, owner: str | None) -> list[str]:
    """What is said in `files`, which are loaded, one after another.

    A chat has its earlier sounds again in each turn: transcripts are kept as media are (`media_cache_bytes`), for their
    owner.

    Raises:
        ApiError: naming the field of the file at fault.
    """
    model, found = model_that_hears(gateway), list[str]()
    for number, file in enumerate(files):
        name = MediaName(owner, f"{model} {hashlib.sha256(file.content).hexdigest()}")
        kept = gateway.fetcher.kept.get(name, _TRANSCRIPT)
        if kept is None:
            kept = (await _transcript(gateway, model, file, f"{request_id}-sound-{number}", owner)).encode()
            gateway.fetcher.kept.put(name, _TRANSCRIPT, kept)
        found.append(kept.decode())
    return found


async def _transcript(gateway: Gateway, model: str, file: MediaFile, request_id: str, owner: str | None) -> str:
    limit_s = gateway.settings.request_timeout_s
    sound = FileSound(gateway.fetcher.decoding.sounds, file.content, Pauses(), limit_s, owner=owner)
    sound.field = file.field
    work = TranscriptionRun(gateway, TranscriptionRequest(model=model), sound, request_id, {})
    async with aclosing(work.deltas()) as deltas:
        async for _ in deltas:
            pass
    return joined(work.segments)
