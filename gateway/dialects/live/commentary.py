"""Answers that the client asks for: what it says, what its helper found, and what follows from its functions."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import structlog

from gateway.dialects.live.delegations import Delegations
from gateway.dialects.live.events import error_event
from gateway.dialects.realtime.conversation.items import message, new_item
from gateway.dialects.realtime.events import RealtimeError
from gateway.dialects.realtime.output.responses import Response
from gateway.dialects.realtime.session_handler import SessionHandler
from gateway.errors import ApiError, gateway_fault

log = structlog.get_logger()
_MOST_WAITING, _MOST_PIECES = 8, 64
_MORE_S = 0.05  # clients send a long answer in pieces
# Clients send both: what to say, and what to do ("greet the user").
_SAY = "Speak to the user now: do what follows, or say it in your own spoken words. "


class Commentary:
    """What waits to be said, one after another, each when no answer is being made."""

    def __init__(self, session: SessionHandler, delegations: Delegations) -> None:
        self._session, self._delegations = session, delegations
        self._waiting = deque[tuple[str | None, list[str]] | None]()  # (delegation, pieces); None: to go on
        self._notes: dict[str, list[str]] = {}  # by delegation, for its answer
        self._changed = asyncio.Event()
        self._going_on: Response | None = None  # the last answer that began by `go_on`
        self._has_news = False  # since it began

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting)

    def note(self, delegation_id: str, content: str) -> bool:
        """Keeps what the model shall know when the delegation is answered. Returns False: it was answered before.

        Raises RealtimeError: there is too much."""
        if not self._delegations.is_open(delegation_id):
            return False
        notes = self._notes.setdefault(delegation_id, [])
        _check(len(notes) < _MOST_PIECES, f"a delegation has {_MOST_PIECES} pieces of thinking, its most")
        notes.append(content)
        return True

    def add(self, delegation_id: str | None, content: str) -> None:
        """Raises RealtimeError: too much waits."""
        last = self._waiting[-1] if self._waiting else None
        if last is not None and last[0] == delegation_id:
            _check(len(last[1]) < _MOST_PIECES, f"{_MOST_PIECES} pieces wait to be said, the most; send it later")
            last[1].append(content)
        else:
            self._put((delegation_id, [content]))

    def add_news(self) -> None:
        """The conversation has an item of the client's more, for the next answer."""
        self._has_news = True

    def go_on(self) -> None:
        """The model answers what is new. Raises RealtimeError: it is about to, or does so now; or too much waits."""
        is_answered = self._going_on is not None and self._going_on is self._session.active and not self._has_news
        if None in self._waiting or is_answered:
            reason = "wait for response.completed, and send response.create for what is new then"
            message = f"the conversation has an active response already, or one that waits to begin; {reason}"
            raise RealtimeError("conversation_already_has_active_response", message)
        self._put(None)

    def _put(self, entry: tuple[str | None, list[str]] | None) -> None:
        _check(len(self._waiting) < _MOST_WAITING, f"{_MOST_WAITING} answers wait to be made; send it later")
        self._waiting.append(entry)
        self._changed.set()

    async def run(self, put: Callable[[dict[str, Any]], None]) -> None:
        """Starts answers until it is cancelled. `put` sends an event."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._waiting:
                await asyncio.sleep(_MORE_S)
                await self._turn_to_speak()
                entry = self._waiting.popleft()
                try:
                    await self._answer(entry)
                except ApiError as error:
                    put(error_event(error))
                except Exception as error:  # a bug: the session goes on
                    log.exception("live commentary failed", exc_info=error)
                    put(error_event(gateway_fault()))

    async def _turn_to_speak(self) -> None:
        """Returns when nobody speaks: the user's turn is answered first."""
        while (active := self._session.active) is not None or self._session.user_speaks:
            if active is None:
                await asyncio.sleep(_MORE_S)
            else:
                await asyncio.wait([active.task])

    async def _answer(self, entry: tuple[str | None, list[str]] | None) -> None:
        """Raises ApiError."""
        if entry is None:
            self._delegations.go_on()
            self._going_on, self._has_news = self._session.respond(), False
        else:
            delegation_id, pieces = entry
            text = "".join(pieces)
            call_id = None if delegation_id is None else self._delegations.answered(delegation_id)
            if call_id is None:
                item = message("system", [{"type": "input_text", "text": f"{_SAY}{text}"}])
            else:
                notes = self._notes.pop(delegation_id or "", [])
                item = new_item("function_call_output", call_id=call_id, output="\n".join([*notes, text]))
            await self._session.add_item(item)
            self._session.respond()


def _check(has_room: bool, reason: str) -> None:
    """Raises RealtimeError."""
    if not has_room:
        raise RealtimeError("response_input_buffer_full", reason)
