"""What both sides say, as text with its times on the session's clock.

Clients make turns of the texts' times. So none begins before one that was sent earlier, and what the user said comes
before the answer to it, which waits a while for that."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from gateway.dialects.live.caption import Caption
from gateway.dialects.realtime.conversation.items import SpokenWord
from gateway.dialects.realtime.events import server_event

HOLD_S = 2.0  # an answer's text waits so long for the user's


class LiveTranscripts:
    """`put` sends an event."""

    def __init__(self, put: Callable[[dict[str, Any]], None]) -> None:
        self._put = put
        self._turns: dict[str, tuple[int, int]] = {}  # of the user, that are being written down: (start, end) in ms
        self._held: list[Callable[[], None]] = []
        self._answers: dict[str, Caption] = {}
        self._told_ms: dict[str, int] = {}  # up to where each answer was told
        self._last_ms = 0

    def turn(self, item_id: str, start_ms: int, end_ms: int) -> None:
        """The user has spoken, and will be written down."""
        self._turns[item_id] = start_ms, end_ms
        asyncio.get_running_loop().call_later(HOLD_S, self.settle, item_id)

    def user(self, item_id: str, delta: str) -> None:
        if delta:
            start_ms, end_ms = self._turns.get(item_id, (self._last_ms, self._last_ms))
            self._tell("input", delta, start_ms, end_ms)

    def settle(self, item_id: str) -> None:
        """The user's turn is written down, or too late."""
        self._turns.pop(item_id, None)
        if not self._turns:
            held, self._held = self._held, []
            for action in held:
                action()

    def after_user(self, action: Callable[[], None]) -> None:
        """Runs `action` when all that the user said has been sent."""
        if self._turns or self._held:
            self._held.append(action)
        else:
            action()

    def text(self, item_id: str, delta: str) -> None:
        """More of an answer's text, which is ahead of its sound."""
        self._answers.setdefault(item_id, Caption()).add(delta)

    def sound(self, item_id: str, made_ms: float) -> None:
        self._answers.setdefault(item_id, Caption()).sound_ms += made_ms

    def complete(self, item_id: str, text: str) -> bool:
        """All of the answer's sound is there, and `text` is its text. Returns False: nothing of it will be heard."""
        answer = self._answers.get(item_id)
        if answer is None or not answer.sound_ms:
            self._answers.pop(item_id, None)
            return False
        answer.complete(text)
        return True

    def played(self, item_id: str, words: Sequence[SpokenWord], played_ms: int, begin_ms: int, end_ms: int) -> None:
        """Sends the words of the first `played_ms` of an answer, of which the last sound was from `begin_ms`. `words`:
        their times, where they are known."""
        answer = self._answers.get(item_id)
        if answer is not None:
            self._told_ms.setdefault(item_id, begin_ms)
            self._say(item_id, answer.heard(played_ms, words), end_ms)

    def finish(self, item_id: str, end_ms: int) -> None:
        """All of the answer has been played."""
        answer = self._answers.pop(item_id, None)
        if answer is not None:
            self._say(item_id, answer.rest(), end_ms)
            self._forget(item_id)

    def cut(self, item_id: str, words: Sequence[SpokenWord], played_ms: int, end_ms: int) -> str | None:
        """Returns what the client reads of an answer that ends here; None: the answer is unknown."""
        answer = self._answers.pop(item_id, None)
        if answer is None:
            return None
        if played_ms:
            self._say(item_id, answer.heard(played_ms, words), end_ms)
        self._forget(item_id)
        return answer.text[: answer.told]

    def _say(self, item_id: str, delta: str, end_ms: int) -> None:
        if delta:
            start_ms, self._told_ms[item_id] = self._told_ms.get(item_id, end_ms), end_ms
            self.after_user(lambda: self._tell("output", delta, start_ms, end_ms))

    def _forget(self, item_id: str) -> None:
        self._told_ms.pop(item_id, None)

    def _tell(self, side: str, delta: str, start_ms: int, end_ms: int) -> None:
        self._last_ms = start_ms = max(start_ms, self._last_ms)
        members = {"delta": delta, "start_ms": start_ms, "end_ms": max(start_ms, end_ms)}
        self._put(server_event(f"session.{side}_transcript.delta", **members))
