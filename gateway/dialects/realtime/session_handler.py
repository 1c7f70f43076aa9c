"""Handles the events of a session's client."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from gateway.access.api_key import ApiKey
from gateway.answers.gateway import Gateway
from gateway.dialects.realtime import events
from gateway.dialects.realtime.conversation.conversation import Conversation
from gateway.dialects.realtime.conversation.items import Item, decode_base64, parse_item, parse_items, spoken
from gateway.dialects.realtime.conversation.prompt import Prompt, load_images
from gateway.dialects.realtime.events import ClientEvent, RealtimeError, in_thread_if_long, server_event, wrong
from gateway.dialects.realtime.input.input_buffer import InputBuffer
from gateway.dialects.realtime.input.transcriber import Transcriber
from gateway.dialects.realtime.input.turn_listener import TurnListener
from gateway.dialects.realtime.output.outbox import EventSink
from gateway.dialects.realtime.output.playback import Playback
from gateway.dialects.realtime.output.responses import Request, Response, check_metadata
from gateway.dialects.realtime.output.sound_quality import SoundQuality
from gateway.dialects.realtime.output.tools import check_tools
from gateway.dialects.realtime.output.word_timer import WordTimer
from gateway.dialects.realtime.settings.session import Session
from gateway.listening.detector import DetectorError

# Events that do not change the input of a speculative answer.
_HARMLESS = (events.AudioAppend, events.ItemRetrieve, events.ResponseCancel)
MAX_ITEMS = 1000  # of a session's conversation
_SOUND_STOPS_S = 1.0  # a client that has sent nothing for so long sends no more of the turn
_MAX_SIDE_RESPONSES = 8  # out of band, at a time


class SessionHandler:
    """One session.

    Args:
        log: fields of the connection's log line.
        playback: of answers, where the server plays them; None: the client does.
        transport: the label of its metrics.

    Attributes:
        quality: of its sound.
    """

    error_event = staticmethod(events.error_event)

    def __init__(
        self,
        gateway: Gateway,
        session: Session,
        outbox: EventSink,
        key: ApiKey | None,
        log: dict[str, Any],
        playback: Playback | None = None,
        *,
        transport: str = "websocket",
    ) -> None:
        self._gateway, self._outbox, self._key, self._log = gateway, outbox, key, log
        self.playback = playback
        self.session, self.quality = session, SoundQuality(transport)
        most, held, owner = gateway.settings.max_realtime_bytes, gateway.held_by_sessions, key and key.name
        self.conversation = Conversation(MAX_ITEMS, most, held, owner)
        self.buffer = InputBuffer(session.input_format)
        self._active: Response | None = None
        self._responses: dict[str, Response] = {}
        self._spoke, self._heard_at = False, 0.0
        self._has_unanswered = False  # sound was committed after the last response
        self._listener: TurnListener | None = None
        self._timer = WordTimer(gateway)
        self._transcriber = Transcriber(gateway, self.send, key)
        self._handlers: dict[type, Callable[[Any], Awaitable[None]]] = {
            events.SessionUpdate: self._update,
            events.AudioAppend: self._append,
            events.AudioCommit: self._commit,
            events.AudioClear: self._clear,
            events.ItemCreate: self._create_item,
            events.ItemRetrieve: self._retrieve,
            events.ItemDelete: self._delete,
            events.ItemTruncate: self._truncate,
            events.ResponseCreate: self._respond,
            events.ResponseCancel: self._cancel,
        }

    @property
    def active(self) -> Response | None:
        """The conversation's response that goes on."""
        # `_ended` may be late: events of the client that wait already are handled without a turn of the event loop.
        return None if self._active is None or self._active.task.done() else self._active

    @property
    def is_busy(self) -> bool:
        """Whether it works for the client."""
        return bool(self._responses) or self._transcriber.is_busy

    async def finish(self) -> None:
        """Returns when the answers that the client knows of have ended, and what the user said is transcribed."""
        await self._discard_speculation()
        if tasks := [response.task for response in self._responses.values()]:
            await asyncio.wait(tasks)
        await self._transcriber.finish()

    @property
    def user_speaks(self) -> bool:
        """Whether a turn of the user's goes on, and its sound still comes."""
        is_speaking = self._listener is not None and self._listener.user_speaks
        return is_speaking and time.monotonic() - self._heard_at < _SOUND_STOPS_S

    async def close(self) -> None:
        dropping = (response.drop() for response in self._responses.values())
        await asyncio.gather(self._transcriber.close(), self._timer.close(), *dropping)
        # The session is in reference cycles, which Python may collect only hours later.
        self._close_listener()
        self.buffer = InputBuffer(self.session.input_format)  # a thread may still be at work on the other one
        self.conversation.clear()

    async def handle(self, event: ClientEvent) -> None:
        """Handles an event of the client. Raises ApiError: nothing was changed."""
        handler = self._handlers.get(type(event))
        if not isinstance(event, _HARMLESS):
            await self._discard_speculation()
        if handler is not None:  # the others are for WebRTC and SIP
            await handler(event)

    async def _discard_speculation(self) -> None:
        if self._listener is not None:
            await self._listener.discard_speculation()

    async def add_item(self, item: Item) -> None:
        """Adds what the client does not know as an item. Raises RealtimeError: the conversation is full."""
        await self._discard_speculation()
        self.conversation.add(item)

    async def change(self, session: Session) -> None:
        """Changes the settings, which were checked."""
        await self._discard_speculation()
        self.session = session

    def send(self, kind: str, /, **members: Any) -> None:
        self._outbox.put(server_event(kind, **members))

    async def _update(self, event: events.SessionUpdate) -> None:
        session = self.session.updated(event.session)
        check_tools(self._gateway, session)
        if self._has_spoken() and session.voice != self.session.voice:
            reason = "cannot change once the model has spoken"
            raise wrong("session.audio.output.voice", reason, "cannot_update_voice")
        if session.input_format != self.session.input_format:
            self.buffer.change_format(session.input_format)
        self.session = session
        self.send("session.updated", session=session.public())

    async def _append(self, event: events.AudioAppend) -> None:
        data = event.audio
        await self.hear(await in_thread_if_long(len(data), lambda: decode_base64(data, "audio")))

    async def hear(self, data: bytes) -> None:
        """Takes sound of the user's, in the session's format. Raises RealtimeError."""
        begin_ms, self._heard_at = self.buffer.returned_ms, time.monotonic()
        samples = await in_thread_if_long(len(data), lambda: self.buffer.add(data))
        rules = self.session.turn_detection
        if rules is None:
            await self._reset_turn()
            self._close_listener()
            return
        try:
            if self._listener is None:
                self._listener = TurnListener(self, self._gateway, self._gateway.detectors.open(begin_ms), rules)
            await self._listener.listen(samples, rules)
        except DetectorError as error:
            await self._reset_turn()
            self._close_listener()
            raise RealtimeError("detector_failed", str(error), kind="server_error") from None

    async def _commit(self, event: events.AudioCommit) -> None:
        self.commit(spoken(self.buffer.all()))
        await self._reset_turn()
        self.buffer.clear()

    async def _clear(self, event: events.AudioClear) -> None:
        await self._reset_turn()
        self.buffer.clear()
        self.send("input_audio_buffer.cleared")

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._listener = None

    async def _reset_turn(self) -> None:
        if self._listener is not None:
            await self._listener.reset_turn()

    def commit(self, item: Item) -> None:
        is_answered = self.session.type == "realtime"
        previous = self.conversation.add(item, makes_room=not is_answered)
        self.send("input_audio_buffer.committed", previous_item_id=previous, item_id=item.id)
        self._send_added(item, previous)
        # beside an answer it is a part of it; without one it is what the key's limits are about
        is_counted, self._has_unanswered = not is_answered or self._has_unanswered, True
        if (settings := self.session.transcription) is not None:
            self._transcriber.add(item, settings, is_answered, is_counted)

    def _send_added(self, item: Item, previous: str | None) -> None:
        self.send("conversation.item.added", previous_item_id=previous, item=item.public())
        self.send("conversation.item.done", previous_item_id=previous, item=item.public())

    async def _create_item(self, event: events.ItemCreate) -> None:
        # in a thread: its sound may be long
        item = await asyncio.to_thread(parse_item, event.item, self.session.input_format)
        self.conversation.check_place(event.previous_item_id)  # before images are fetched in vain
        await load_images(self._gateway, item, "item")
        self._send_added(item, self.conversation.add(item, event.previous_item_id))

    async def _retrieve(self, event: events.ItemRetrieve) -> None:
        item = self.conversation.require(event.item_id, "retrieve")
        self.send("conversation.item.retrieved", item=item.public())

    async def _delete(self, event: events.ItemDelete) -> None:
        self.conversation.delete(event.item_id)
        self._transcriber.remove(event.item_id)
        self.send("conversation.item.deleted", item_id=event.item_id)

    async def _truncate(self, event: events.ItemTruncate) -> None:
        cut = {"item_id": event.item_id, "content_index": event.content_index, "audio_end_ms": event.audio_end_ms}
        self.conversation.truncate(event.item_id, event.content_index, event.audio_end_ms)
        self.send("conversation.item.truncated", **cut)

    async def _respond(self, event: events.ResponseCreate) -> None:
        if self.session.type == "transcription":
            raise wrong("type", "a transcription session has no responses")
        request = event.response or {}
        conversation = request.get("conversation") or "auto"
        if conversation not in ("auto", "none"):
            raise wrong("response.conversation", 'must be "auto" or "none"')
        if conversation == "none" and len(self._responses) - (self.active is not None) >= _MAX_SIDE_RESPONSES:
            raise RealtimeError("too_many_responses", f"at most {_MAX_SIDE_RESPONSES} responses run at a time")
        metadata, input_ = check_metadata(request.get("metadata")), request.get("input")
        if conversation == "auto":
            self._check_idle()
        session = self.session.for_response(request)
        check_tools(self._gateway, session, "response")
        items = None
        if input_ is not None:
            items = await asyncio.to_thread(parse_items, input_, self.session.input_format, self.conversation.find)
            for index, item in enumerate(items):
                if not item.images:
                    await load_images(self._gateway, item, f"response.input[{index}]")
        self.respond(session, items, metadata, out_of_band=conversation == "none")

    def _check_idle(self) -> None:
        if self.active is not None:
            message = f"the conversation has an active response already: {self.active.id}; wait for response.done"
            raise RealtimeError("conversation_already_has_active_response", message)

    def respond(
        self,
        session: Session | None = None,
        items: list[Item] | None = None,
        metadata: dict[str, Any] | None = None,
        *,
        out_of_band: bool = False,
        speculative: bool = False,
    ) -> Response:
        """Starts a response.

        Args:
            session: None: as the session is.
            items: of the prompt; None: those of the conversation.
            metadata: for the client's own use.
            out_of_band: keeps the answer out of the conversation.
            speculative: holds the events until `Response.release`.

        Raises:
            RealtimeError: the conversation has an active response.
        """
        if not out_of_band:
            self._check_idle()
        items = self.conversation.context() if items is None else items
        prompt = Prompt(session or self.session, items, self.conversation.id)
        conversation = None if out_of_band else self.conversation
        request = Request(prompt, metadata, conversation, self._key, self._log, self.quality, self._timer)
        response = Response(self._gateway, request, self._outbox, speculative)
        if not out_of_band:
            self._active = response
            if self._listener is not None:
                self._listener.idle_from(None)
        self._has_unanswered = False
        self._responses[response.id] = response
        response.task.add_done_callback(lambda _: self._ended(response))
        return response

    def _has_spoken(self) -> bool:
        return self._spoke or any(response.played_at for response in self._responses.values())

    def _ended(self, response: Response) -> None:
        self._spoke = self._has_spoken()
        del self._responses[response.id]
        if self._active is response:
            self._active = None
            if not response.is_speculative:
                self.quality.answer_ended()
            if self._listener is not None and not response.is_speculative:
                self._listener.idle_from(response.played_at)

    async def _cancel(self, event: events.ResponseCancel) -> None:
        id = event.response_id
        found = self.active if id is None else self._responses.get(id)
        if found is None or found.is_speculative:  # unknown to the client
            message = "Cancellation failed: no active response found"
            raise RealtimeError("response_cancel_not_active", message, "response_id" if id else None)
        await found.cancel("client_cancelled")
