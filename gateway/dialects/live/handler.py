"""Handles the events of a Live session's client: a translation around an unchanged realtime session."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from gateway.access.api_key import ApiKey
from gateway.answers.gateway import Gateway
from gateway.dialects.live import events
from gateway.dialects.live.clock import SessionClock
from gateway.dialects.live.commentary import Commentary
from gateway.dialects.live.delegations import ClientDelegations, ResponsesDelegations
from gateway.dialects.live.events import LiveEvent, acknowledged, unsupported
from gateway.dialects.live.output import FIXTURE, LiveOutput
from gateway.dialects.live.readers import Readers
from gateway.dialects.live.session_config import LiveConfig
from gateway.dialects.live.sound import ClientSound
from gateway.dialects.realtime.conversation.items import decode_base64, message, parse_item
from gateway.dialects.realtime.conversation.prompt import load_images
from gateway.dialects.realtime.events import RealtimeError, in_thread_if_long, new_id_at, wrong
from gateway.dialects.realtime.output.tools import check_tools
from gateway.dialects.realtime.session_handler import SessionHandler
from gateway.dialects.realtime.settings.session import Session
from gateway.media.encode import BYTES_PER_SAMPLE

_MAX_FIXTURE_S = 30
_FIXTURE_PLAYS = "a fixture plays; wait for session.output_audio.fixture.played"
_FIXTURE_BYTES_PER_S = 24_000 * BYTES_PER_SAMPLE


class LiveHandler:
    """One session. `log` has the fields of the connection's log line; `transport` is the label of its metrics.

    Attributes:
        id: of the session.
        readers: of its events.
        output: what is played.
        closing: the end was asked for.
        ended_by: then the reason of session.closed.
    """

    def __init__(
        self,
        gateway: Gateway,
        config: LiveConfig,
        session: Session,
        key: ApiKey | None,
        log: dict[str, Any],
        *,
        transport: str,
        calls_tools: bool,
    ) -> None:
        self.id, self.readers, self.closing = new_id_at("live", gateway.node), Readers(), asyncio.Event()
        self.ended_by = "close_requested"
        self._calls_tools = calls_tools
        self._gateway, self._config, self._expires_at = gateway, config, session.expires_at
        self._clock, self._sound = SessionClock(), ClientSound(config.audio.format)
        self._reflected = ClientSound(config.audio.format)  # for sidebands: a resampler takes each sound once
        delegations = ClientDelegations if config.backend is None else ResponsesDelegations
        self.output = LiveOutput(self.readers, self._clock, config.audio.format, delegations)
        self._session = SessionHandler(gateway, session, self.output, key, log, self.output, transport=transport)
        self.output.conversation = self._session.conversation
        self._commentary = Commentary(self._session, self.output.delegations)
        self._is_muted = self._plays_fixture = False
        for past in config.input or ():
            self._session.conversation.add(past.item)
        self._handlers: dict[type, Callable[[Any], Awaitable[None]]] = {
            events.LiveStart: self._start_again,
            events.LiveUpdate: self._update,
            events.LiveAudioAppend: self._hear,
            events.LiveMute: self._mute,
            events.LiveUnmute: self._mute,
            events.FixturePlay: self._play,
            events.InstructionsAppend: self._note,
            events.ThinkingAppend: self._note,
            events.CommentaryAppend: self._say,
            events.DelegatedItem: self._add_item,
            events.DelegatedResponse: self._go_on,
            events.LiveClose: self._close,
        }

    @property
    def elapsed_s(self) -> float:
        return self._clock.now_ms / 1000

    @property
    def is_busy(self) -> bool:
        """Whether it works for the client, or plays."""
        return self._session.is_busy or self._commentary.is_busy or self.output.is_playing

    def public(self) -> dict[str, Any]:
        """The `session` of session.started and others."""
        config = self._config.model_dump(exclude={"input"}, exclude_none=True)
        config["audio"]["format"]["rate"] = self._config.audio.format.rate_hz
        config["audio"]["output"]["voice"] = self._session.session.public()["audio"]["output"]["voice"]
        config["model"] = self._session.session.lora or self._session.session.model
        ids = {"id": self.id, "status": "active", "expires_at": self._expires_at}
        return {**config, **ids, "delegation": config.get("delegation") or {"type": "client"}}

    async def handle(self, event: LiveEvent) -> None:
        """Handles an event of the client, or a sideband. Raises ApiError: nothing was changed."""
        await self._handlers[type(event)](event)

    async def run(self) -> None:
        """Plays answers, and starts those that the client asks for."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.output.pacer.run())
            tasks.create_task(self._commentary.run(self.readers.put))

    async def finish(self) -> None:
        """Returns when the answers that the client waits for have been heard."""
        await self._session.finish()
        await self.output.played()

    async def close(self) -> None:
        await self._session.close()

    async def _start_again(self, event: events.LiveStart) -> None:
        raise RealtimeError(
            "session_already_started", "the session has started; a new one needs a connection of its own"
        )

    async def _update(self, event: events.LiveUpdate) -> None:
        config = self._config.updated(event.session)
        if (config.backend is None) != (self._config.backend is None):
            raise unsupported("session.delegation.type", "cannot change once the session has started")
        session = self._session.session.updated(
            config.realtime_tools(self._calls_tools), "session.delegation.responses"
        )
        check_tools(self._gateway, session, "session.delegation.responses")
        await self._session.change(session)
        self._config = config
        self.readers.put(acknowledged("session.updated", event, session=self.public()))

    async def _hear(self, event: events.LiveAudioAppend) -> None:
        data = await in_thread_if_long(len(event.audio), lambda: decode_base64(event.audio, "audio"))
        if self._plays_fixture:
            raise RealtimeError(
                "input_audio_unavailable", "a fixture plays; wait for session.output_audio.fixture.played"
            )
        self._clock.hear(self._sound.ms_of(data))
        if self.readers.sidebands:
            self.readers.put_heard(self._reflected.pcm16(data))
        await self._session.hear(self._sound.for_session(self._sound.silence_as(data) if self._is_muted else data))

    async def _mute(self, event: events.LiveMute | events.LiveUnmute) -> None:
        self._is_muted = isinstance(event, events.LiveMute)
        self.readers.put(acknowledged(f"{event.type}d", event))

    async def _play(self, event: events.FixturePlay) -> None:
        data = await in_thread_if_long(len(event.audio), lambda: decode_base64(event.audio, "audio"))
        if not 0 < len(data) <= _MAX_FIXTURE_S * _FIXTURE_BYTES_PER_S or len(data) % BYTES_PER_SAMPLE:
            raise wrong("audio", f"must be PCM16 at 24 kHz of at most {_MAX_FIXTURE_S} s")
        if self._plays_fixture:
            raise RealtimeError("fixture_playing", _FIXTURE_PLAYS)
        self._plays_fixture = True
        pacer = self.output.pacer
        pacer.mark(lambda: self.readers.put(acknowledged("session.output_audio.fixture.playing", event)))
        pacer.add(FIXTURE, data)
        pacer.end(FIXTURE)
        pacer.mark(lambda: self._fixture_played(event))

    def _fixture_played(self, event: events.FixturePlay) -> None:
        self._plays_fixture = False
        self.readers.put(acknowledged("session.output_audio.fixture.played", event))

    async def _note(self, event: events.InstructionsAppend | events.ThinkingAppend) -> None:
        if event.delegation_id is None or not self._commentary.note(event.delegation_id, event.content):
            await self._session.add_item(message("system", [{"type": "input_text", "text": event.content}]))
        self._acknowledge(event)

    async def _say(self, event: events.CommentaryAppend) -> None:
        self._commentary.add(event.delegation_id, event.content)
        self._acknowledge(event)

    def _acknowledge(self, event: events.LiveAppend) -> None:
        now_ms = self._clock.now_ms
        self.readers.put(acknowledged(f"{event.type}ed", event, start_ms=now_ms, end_ms=now_ms))

    async def _add_item(self, event: events.DelegatedItem) -> None:
        members = event.item
        if members.get("role") == "developer":
            members = {**members, "role": "system"}
        if isinstance(members.get("content"), str):
            kind = "output_text" if members.get("role") == "assistant" else "input_text"
            members = {**members, "content": [{"type": kind, "text": members["content"]}]}
        item = await asyncio.to_thread(parse_item, members, "audio/pcm")
        self.output.delegations.check_output(event.item)
        await load_images(self._gateway, item, "item")
        await self._session.add_item(item)
        self._commentary.add_news()

    async def _go_on(self, event: events.DelegatedResponse) -> None:
        self.output.delegations.check_answered()
        self._commentary.go_on()

    async def _close(self, event: events.LiveClose) -> None:
        self.closing.set()

    def hang_up(self) -> None:
        """Ends the session, from elsewhere."""
        self.ended_by = "remote_hangup"
        self.closing.set()
