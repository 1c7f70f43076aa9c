"""`/v1/audio/speech/stream`, a WebSocket: speaks a text while it is written.

The client sends `session.config` with the settings of POST /v1/audio/speech, any number of `input.text`, and
`input.done`. The server sends `audio.start`, binary messages of audio, `audio.done` and `session.done`. The text is one
utterance: the speech waits for late text."""

from contextlib import aclosing, asynccontextmanager
from typing import Any, Literal

from fastapi import APIRouter, WebSocket
from pydantic import BaseModel, Field
from starlette.status import WS_1000_NORMAL_CLOSURE

from gateway.answers.gateway import Gateway
from gateway.dialects.openai.speech import MEDIA_TYPES, SpeechRun, SpeechSettings, nothing_to_say
from gateway.errors import invalid
from gateway.http.connection import LAST_WORD_S, ClientGone, admitted
from gateway.http.csrf import check_socket
from gateway.http.forms import in_time, parsed
from gateway.http.sockets import receive_text, serve
from gateway.pipeline.typed_text import TypedText
from gateway.tasks import first, limited
from gateway.validation import Strict

router = APIRouter(tags=["speech"])


class SessionConfig(SpeechSettings):
    """The first message: how to speak."""

    type: Literal["session.config"]
    non_streaming_mode: bool | None = Field(default=False, description="wait for all of the text; null: the model's")


class InputTextMessage(Strict):
    type: Literal["input.text"]
    text: str


class InputDoneMessage(Strict):
    type: Literal["input.done"]


class _Message(BaseModel):
    type: Literal["session.config", "input.text", "input.done"]


_MESSAGES = {"session.config": SessionConfig, "input.text": InputTextMessage, "input.done": InputDoneMessage}


@router.websocket("/v1/audio/speech/stream")
async def speak_as_typed(socket: WebSocket) -> None:
    """Speaks a text while it is written."""
    limit_s = socket.app.state.gateway.settings.request_timeout_s + LAST_WORD_S
    async with limited(limit_s, ClientGone()):  # the client does not read
        await serve(socket, _serve, lambda error: {"type": "error", **error.body()})


async def _serve(socket: WebSocket) -> int:
    """The code to close with. Raises ApiError; WebSocketDisconnect."""
    check_socket(socket)
    async with asynccontextmanager(admitted)(socket) as gateway:
        await _Session(gateway, socket).run()
    return WS_1000_NORMAL_CLOSURE


class _Session:
    def __init__(self, gateway: Gateway, socket: WebSocket) -> None:
        self._gateway, self._socket, self._text = gateway, socket, TypedText()

    async def run(self) -> None:
        """Runs until the speech ends. Raises ApiError; WebSocketDisconnect."""
        async with in_time(self._socket, "session.config"):
            config = await self._message()
        if not isinstance(config, SessionConfig):
            raise invalid("type", "the first message must be session.config")
        speech_run = await SpeechRun.begin(self._gateway, config, self._socket, "text")
        await first(self._speak(speech_run, config), self._read(speech_run))

    async def _read(self, speech_run: SpeechRun) -> None:
        """Reads the text. Only a disconnection or a wrong message ends it."""
        is_done = False
        while True:
            message = await self._message()
            if isinstance(message, SessionConfig) or is_done:
                raise invalid("type", "after input.done comes nothing" if is_done else "session.config comes once")
            if isinstance(message, InputTextMessage):
                speech_run.check_length("text", self._text.characters + len(message.text))
                if message.text:  # empty texts must take no memory
                    self._text.add(message.text)
            else:
                if not self._text.is_speakable:
                    raise nothing_to_say("text")
                self._text.finish()
                is_done = True

    async def _speak(self, speech_run: SpeechRun, config: SessionConfig) -> None:
        file = {"format": config.response_format, "media_type": MEDIA_TYPES[config.response_format]}
        await self._socket.send_json({"type": "audio.start", **file, "sample_rate_hz": speech_run.sample_rate_hz})
        async with aclosing(speech_run.file([self._text])) as pieces:
            async for piece in pieces:
                await self._socket.send_bytes(piece)
        end = {"finish_reason": speech_run.finish_reason, "usage": speech_run.usage}
        await self._socket.send_json({"type": "audio.done", **end})
        await self._socket.send_json({"type": "session.done"})

    async def _message(self) -> Any:
        """Raises ApiError: 400 naming the member at fault; WebSocketDisconnect."""
        if (text := await receive_text(self._socket)) is None:
            raise invalid("type", "messages of a client are JSON texts")
        kind = (await parsed(_Message, text)).type
        return await parsed(_MESSAGES[kind], text)
