"""Requests for transcriptions whose body is JSON: what such a body has for the form's file.

A line of a batch is one.
"""

from typing import Any

from pydantic import Field

from gateway.answers.files.contents import read_file
from gateway.answers.gateway import Gateway
from gateway.answers.transcription.request import TranscriptionRequest, TranslationRequest
from gateway.errors import invalid
from gateway.media.fetch import media_errors
from gateway.validation import Strict

_NAMES = ("file", "file_id", "file_url", "input_audio")


class _InputAudio(Strict):
    """A file as chats have it."""

    data: str = Field(description="base64, or a data, https or http URL")
    format: str | None = Field(default=None, description="accepted; the sound itself says what it is")


class _Sound(Strict):
    """One of these."""

    file: str | None = Field(default=None, description="base64, or a data, https or http URL")
    file_id: str | None = Field(default=None, description="of an uploaded file, instead of file")
    file_url: str | None = Field(default=None, description="a data, https or http URL, instead of file")
    input_audio: _InputAudio | None = Field(default=None, description="instead of file")

    async def read(self, gateway: Gateway, owner: str | None) -> bytes:
        """The sound; an uploaded one is `owner`'s.

        Raises:
            ApiError: 400 naming the member, there is none, or more than one; the file is not there, or too large.
        """
        if not (given := [name for name in _NAMES if getattr(self, name) is not None]):
            reason = f"required, but missing; in JSON it is one of {', '.join(_NAMES)}"
            raise invalid("file", reason, "missing_required_parameter")
        if len(given) > 1:
            raise invalid(given[1], f"and {given[0]} are one file too many: send one of them")
        if self.file_id is not None:
            return await read_file(gateway, self.file_id, "file_id", owner)
        fetcher = gateway.fetcher
        with media_errors("input_audio.data" if self.input_audio else given[0]):
            if self.file_url is not None:
                return await fetcher.get(self.file_url, "audio")
            sound = self.input_audio.data if self.input_audio else self.file or ""
            return await fetcher.get_or_decode(sound, "audio", fetcher.limits.media_max_bytes)


class _TranscriptionInJson(TranscriptionRequest, _Sound):
    pass


class _TranslationInJson(TranslationRequest, _Sound):
    pass


IN_JSON: dict[type[TranslationRequest], type[Any]] = {
    TranscriptionRequest: _TranscriptionInJson,
    TranslationRequest: _TranslationInJson,
}
"""The models of bodies in JSON, by those of forms."""
