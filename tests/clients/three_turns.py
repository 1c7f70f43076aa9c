"""The user's part of a conversation with OpenAI's Live API: three turns, of which the second interrupts an answer."""

import asyncio
import time
from dataclasses import dataclass, field

from microphone import RATE_HZ, Microphone

_INTO_ANSWER_S = 1.0  # after its first sound
_QUIET_S = 3.0  # behind an answer


@dataclass
class _Turn:
    """Times are `time.monotonic()`. `sound`: (when it had come, seconds of it), from all answers after the turn."""

    spoken_at: float
    sound: list[tuple[float, float]] = field(default_factory=list)


class ThreeTurns:
    """The program tells what it hears."""

    def __init__(self, microphone: Microphone) -> None:
        self._microphone, self._turns = microphone, list[_Turn]()
        self._written, self._heard = asyncio.Event(), asyncio.Event()
        self._heard_at = 0.0

    def written(self) -> None:
        """A transcript of the user's words has come."""
        self._written.set()

    def heard(self, pcm16: bytes) -> None:
        """Sound of the model's has come: mono."""
        if any(pcm16):
            self._heard_at = time.monotonic()
            self._heard.set()
            if self._turns:
                self._turns[-1].sound.append((self._heard_at, len(pcm16) / 2 / RATE_HZ))

    async def run(self) -> None:
        """Returns when it has been quiet after the answer to the third turn."""
        await self._say("first")
        await asyncio.sleep(_INTO_ANSWER_S)
        for name in ("second", "third"):
            await self._say(name)
            while (left_s := self._heard_at + _QUIET_S - time.monotonic()) > 0:
                await asyncio.sleep(left_s)

    async def _say(self, name: str) -> None:
        """Returns when the user's words are written down, and an answer begins."""
        self._written.clear()
        self._microphone.say(name)
        await self._microphone.silence()
        self._turns.append(_Turn(time.monotonic()))
        self._heard.clear()
        await self._written.wait()
        await self._heard.wait()

    @property
    def sound_s(self) -> list[float]:
        """What was heard of the answers after each turn."""
        return [round(sum(length_s for _, length_s in turn.sound), 3) for turn in self._turns]

    @property
    def ahead_ms(self) -> int:
        """By how much the last answer was ahead of one that is played from the end of the user's turn on."""
        turn, sum_s, most_s = self._turns[-1], 0.0, 0.0
        for at, length_s in turn.sound:
            sum_s += length_s
            most_s = max(most_s, sum_s - (at - turn.spoken_at))
        return round(1000 * most_s)
