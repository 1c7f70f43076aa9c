"""A realtime session: what each event of its client does."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from gateway.access.api_keys import ApiKey
from gateway.answers.gateway import Gateway
from gateway.dialects.realtime import events
from gateway.dialects.realtime.conversation.conversation import Conversation, Limits
from gateway.dialects.realtime.conversation.items import (
    Item,
    decode_base64,
    parse_item,
    parse_items,
    spoken,
)
from gateway.dialects.realtime.conversation.prompt import Prompt, load_images
from gateway.dialects.realtime.events import ClientEvent, RealtimeError, apart, error_event, server_event
from gateway.dialects.realtime.input.input_buffer import InputBuffer
from gateway.dialects.realtime.input.transcriber import Transcribing
from gateway.dialects.realtime.input.turn_listener import Listening
from gateway.dialects.realtime.output.drawing import check_tool
from gateway.dialects.realtime.output.outbox import Outbox
from gateway.dialects.realtime.output.responses import Request, Response, check_metadata
from gateway.dialects.realtime.settings.session import Session
from gateway.listening.detector import DetectorError
from gateway.listening.turn_model import TurnModel

# What changes nothing that an answer goes by.
_HARMLESS = (events.AudioAppend, events.ItemRetrieve, events.ResponseCancel)
_MAX_SIDE_RESPONSES = 8  # out of band, at a time


class Conversing:
    """One session's state.

    Args:
        gateway: the gateway.
        session: its settings at the start.
        outbox: takes the server's events.
        key: the client's; None where there are no keys.
        log: fields of the connection's log line.
    """

    def __init__(
        self, gateway: Gateway, session: Session, outbox: Outbox, key: ApiKey | None, log: dict[str, Any]
    ) -> None:
        self._gateway, self._outbox, self._key, self._log = gateway, outbox, key, log
        limits = Limits(gateway.settings.max_realtime_items, gateway.settings.max_realtime_bytes)
        self.session, self.conversation = session, Conversation(limits)
        self.buffer = InputBuffer(session.input_format)
        self._active: Response | None = None
        self._responses: dict[str, tuple[Response, asyncio.Task[None]]] = {}
        self._spoke = False
        self._listening: Listening | None = None
        self._transcribing = Transcribing(gateway, self.tell, key)
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

    def begin(self) -> None:
        """Says what the session is."""
        self.tell("session.created", session=self.session.public())

    async def close(self) -> None:
        """Ends all that is under way."""
        await asyncio.gather(
            self._transcribing.close(), *(response.drop() for response, _ in list(self._responses.values()))
        )
        # A session is in circles of references, which Python may find only hours later.
        self._stop_listening()
        self.buffer = InputBuffer(self.session.input_format)  # a thread may still be at work on the other one
        self.conversation.clear()

    async def take(self, event: ClientEvent) -> None:
        """Does what an event of the client says. Raises RealtimeError, ApiError: nothing was done."""
        handler = self._handlers.get(type(event))
        if self._listening is not None and not isinstance(event, _HARMLESS):
            await self._listening.void()
        if handler is not None:  # others are about what a WebSocket has not
            await handler(event)

    def told(self, error: RealtimeError) -> dict[str, Any]:
        """The event that tells of `error`."""
        return error_event(error)

    def tell(self, kind: str, /, **members: Any) -> None:
        self._outbox.put(server_event(kind, **members))

    async def _update(self, event: events.SessionUpdate) -> None:
        session = self.session.updated(event.session)
        check_tool(self._gateway, session)
        if self._has_spoken() and session.voice != self.session.voice:
            message = "session.audio.output.voice: cannot change once the model has spoken"
            raise RealtimeError("cannot_update_voice", message, "session.audio.output.voice")
        if session.input_format != self.session.input_format:
            self.buffer.change_format(session.input_format)
        self.session = session
        self.tell("session.updated", session=session.public())

    async def _append(self, event: events.AudioAppend) -> None:
        data, begin_ms = event.audio, self.buffer.returned_ms
        samples = await apart(len(data), lambda: self.buffer.add(decode_base64(data, "audio")))
        rules = self.session.turn_detection
        if rules is None:
            await self._forget_turn()
            self._stop_listening()
            return
        try:
            if self._listening is None:
                self._listening = Listening(self, self._gateway.detectors.open(begin_ms), rules)
            self._listening.use(rules)
            await self._listening.hear(samples)
        except DetectorError as error:
            await self._forget_turn()
            self._stop_listening()
            raise RealtimeError("detector_failed", str(error), type="server_error") from None

    async def _commit(self, event: events.AudioCommit) -> None:
        self.commit(spoken(self.buffer.all()))
        await self._forget_turn()
        self.buffer.clear()

    async def _clear(self, event: events.AudioClear) -> None:
        await self._forget_turn()
        self.buffer.clear()
        self.tell("input_audio_buffer.cleared")

    def _stop_listening(self) -> None:
        if self._listening is not None:
            self._listening.close()
        self._listening = None

    async def _forget_turn(self) -> None:
        if self._listening is not None:
            await self._listening.forget()

    @property
    def active(self) -> Response | None:
        """The response that is being written to the conversation."""
        return self._active

    @property
    def may_speculate(self) -> bool:
        """Whether an answer may be begun that might be thrown away: no stage has requests that wait."""
        return self._gateway.settings.realtime_speculation and self._gateway.pipeline.has_room

    @property
    def turn_model(self) -> TurnModel | None:
        """Says whether a turn is complete, if the settings name one."""
        return self._gateway.turn_model

    def commit(self, item: Item) -> None:
        """Makes a user's message of sound the conversation's last item. Raises RealtimeError."""
        is_answered = self.session.type == "realtime"
        previous = self.conversation.add(item, makes_room=not is_answered)
        self.tell("input_audio_buffer.committed", previous_item_id=previous, item_id=item.id)
        self._tell_added(item, previous)
        if (asked := self.session.transcription) is not None:
            self._transcribing.add(item, asked, sound_is_kept=is_answered)

    def _tell_added(self, item: Item, previous: str | None) -> None:
        self.tell("conversation.item.added", previous_item_id=previous, item=item.public())
        self.tell("conversation.item.done", previous_item_id=previous, item=item.public())

    async def _create_item(self, event: events.ItemCreate) -> None:
        # in a thread: its sound may be long
        item = await asyncio.to_thread(parse_item, event.item, self.session.input_format)
        self.conversation.check_place(event.previous_item_id)  # before pictures are fetched in vain
        await load_images(self._gateway, item, "item")
        self._tell_added(item, self.conversation.add(item, event.previous_item_id))

    async def _retrieve(self, event: events.ItemRetrieve) -> None:
        self.tell("conversation.item.retrieved", item=self.conversation.retrieve(event.item_id).public())

    async def _delete(self, event: events.ItemDelete) -> None:
        self.conversation.delete(event.item_id)
        self._transcribing.forget(event.item_id)
        self.tell("conversation.item.deleted", item_id=event.item_id)

    async def _truncate(self, event: events.ItemTruncate) -> None:
        place = {"item_id": event.item_id, "content_index": event.content_index}
        self.conversation.truncate(event.item_id, event.content_index, event.audio_end_ms)
        self.tell("conversation.item.truncated", **place, audio_end_ms=event.audio_end_ms)

    async def _respond(self, event: events.ResponseCreate) -> None:
        if self.session.type == "transcription":
            raise RealtimeError("invalid_value", "type: a transcription session has no responses", "type")
        asked = event.response or {}
        conversation = asked.get("conversation") or "auto"
        if conversation not in ("auto", "none"):
            message = 'response.conversation: must be "auto" or "none"'
            raise RealtimeError("invalid_value", message, "response.conversation")
        if conversation == "none" and len(self._responses) - (self._active is not None) >= _MAX_SIDE_RESPONSES:
            raise RealtimeError("too_many_responses", f"at most {_MAX_SIDE_RESPONSES} responses run at a time")
        metadata, input_ = check_metadata(asked.get("metadata")), asked.get("input")
        if conversation == "auto":
            self._check_idle()
        session = self.session.for_response(asked)
        check_tool(self._gateway, session, "response")
        if input_ is None:
            items = self.conversation.context()
        else:
            items = await asyncio.to_thread(parse_items, input_, self.session.input_format, self.conversation.find)
            for index, item in enumerate(items):
                if not item.images:
                    await load_images(self._gateway, item, f"response.input[{index}]")
        self.respond(session, items, metadata, out_of_band=conversation == "none")

    def _check_idle(self) -> None:
        if self._active is not None:
            message = f"the conversation has an active response already: {self._active.id}; wait for response.done"
            raise RealtimeError("conversation_already_has_active_response", message)

    def respond(
        self,
        session: Session | None = None,
        items: list[Item] | None = None,
        metadata: dict[str, Any] | None = None,
        *,
        after: Item | None = None,
        out_of_band: bool = False,
        held: bool = False,
    ) -> Response:
        """Starts a response.

        Args:
            session: its settings; None: the session's own.
            items: what is answered; None: the conversation.
            metadata: for the client's own use.
            after: what follows the conversation, and is not in it yet.
            out_of_band: it is not written to the conversation.
            held: its events are held back.

        Raises:
            RealtimeError: the conversation has an active response.
        """
        if not out_of_band:
            self._check_idle()
        items = self.conversation.context() if items is None else items
        items = items if after is None else [*items, after]
        prompt = Prompt(session or self.session, items, self.conversation.id)
        conversation = None if out_of_band else self.conversation
        request = Request(prompt, metadata, conversation, self._key, self._log)
        response = Response(self._gateway, request, self._outbox, held)
        if not out_of_band:
            self._active = response
            if self._listening is not None:
                self._listening.idle_from(None)
        task = response.start()
        self._responses[response.id] = response, task
        task.add_done_callback(lambda _: self._ended(response))
        return response

    def _has_spoken(self) -> bool:
        """Whether the client was sent any sound."""
        return self._spoke or any(response.played_at for response, _ in self._responses.values())

    def _ended(self, response: Response) -> None:
        self._spoke = self._has_spoken()
        del self._responses[response.id]
        if self._active is response:
            self._active = None
            if self._listening is not None and not response.is_held:
                self._listening.idle_from(max(0.0, response.played_at - time.monotonic()))

    async def _cancel(self, event: events.ResponseCancel) -> None:
        id = event.response_id
        found = self._active if id is None else self._responses.get(id, (None,))[0]
        if found is None or found.is_held:  # the client knows of none
            message = "Cancellation failed: no active response found"
            raise RealtimeError("response_cancel_not_active", message, "response_id" if id else None)
        await found.cancel("client_cancelled")
