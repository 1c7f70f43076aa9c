"""Clients of spoken sessions, one for each transport: what a crowd of users needs of them."""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from benchmarks.conversations.microphone import Caller, Came, Wire, call
from benchmarks.conversations.utterances import RATE_HZ, silence

Quiet = Literal["nothing", "zeros", "noise"]  # what a session sends while its user says nothing
_BYTES_PER_S = 2 * RATE_HZ
_NOISE_SEED = 7
_OVER_S = 1.0  # without sound, after which a paced answer is over
_LIVE = Wire(
    "/v1/live/sessions",
    "session.input_audio.append",
    "session.started",
    {"type": "session.start", "session": {"model": "gpt-live-1", "audio": {"format": {"type": "audio/pcm"}}}},
)


@dataclass(frozen=True)
class Heard:
    """An answer, not parsed yet.

    Attributes:
        deltas: events with its sound, in `delta`.
        end: the event at its end.
    """

    deltas: Sequence[Came]
    end: Came

    def pieces(self) -> list[tuple[float, float]]:
        """(`time.perf_counter` when it came, seconds that it plays) of each piece of sound. A server that plays answers
        in real time fills gaps with zeros: these are none."""
        sounds = ((each.at_s, base64.b64decode(each.members["delta"])) for each in self.deltas)
        return [(at_s, len(sound) / _BYTES_PER_S) for at_s, sound in sounds if sound.strip(b"\0")]

    @property
    def plays_s(self) -> float:
        """How long it is, about."""
        return sum(len(each.text) * 3 / 4 / _BYTES_PER_S for each in self.deltas)


class UserSession(Protocol):
    """One user's session, which sends sound in real time."""

    @property
    def is_lost(self) -> bool:
        """Whether it has ended."""
        ...

    def say(self, samples: np.ndarray) -> float:
        """Speaks (n,) int16 at RATE_HZ after all earlier sound. Returns the first sample's `time.perf_counter`."""
        ...

    async def answer(self) -> Heard:
        """The answer to what was said. Raises Lost."""
        ...


# Opens a session of a gateway, by its URL, and what it sends while its user says nothing. Raises Lost.
Transport = Callable[[str, float, Quiet], AbstractAsyncContextManager[UserSession]]


class _CallerSession:
    """What sessions by a WebSocket share."""

    def __init__(self, caller: Caller) -> None:
        self._caller, self._seen = caller, 0

    @property
    def is_lost(self) -> bool:
        return bool(self._caller.events) and self._caller.events[-1].kind == "closed"

    def say(self, samples: np.ndarray) -> float:
        self._seen = len(self._caller.events)
        return self._caller.say(samples)


class SocketSession(_CallerSession):
    """One of `/v1/realtime`."""

    async def answer(self) -> Heard:
        end = await self._caller.until("response.done", "error", since=self._seen)
        events = self._caller.events[self._seen :]
        deltas = [each for each in events if each.kind == "response.output_audio.delta" and each.at_s <= end.at_s]
        return Heard(deltas, end)


class LiveSession(_CallerSession):
    """One of `/v1/live/sessions`, whose answers are paced and end without an event."""

    async def answer(self) -> Heard:
        end = await self._caller.until("session.output_audio.delta", "error", since=self._seen)
        while end.kind != "error" and (left_s := end.at_s + _OVER_S - time.perf_counter()) > 0:
            await asyncio.sleep(left_s)
            end = self._sounds()[-1]
        return Heard(self._sounds(), end)

    def _sounds(self) -> list[Came]:
        return [each for each in self._caller.events[self._seen :] if each.kind == "session.output_audio.delta"]


@asynccontextmanager
async def websocket(url: str, append_s: float, quiet: Quiet) -> AsyncIterator[UserSession]:
    """A session of `/v1/realtime`."""
    background = silence(append_s, _NOISE_SEED) if quiet == "noise" else None
    async with call(url, append_s, records=quiet != "nothing", background=background) as caller:
        yield SocketSession(caller)


@asynccontextmanager
async def live(url: str, append_s: float, quiet: Quiet) -> AsyncIterator[UserSession]:
    """A session of `/v1/live/sessions`."""
    background = silence(append_s, _NOISE_SEED) if quiet == "noise" else None
    async with call(url, append_s, records=quiet != "nothing", background=background, wire=_LIVE) as caller:
        yield LiveSession(caller)


@asynccontextmanager
async def webrtc(url: str, append_s: float, quiet: Quiet) -> AsyncIterator[UserSession]:
    """A call of `/v1/realtime/calls`, whose gateway has a process of calls."""
    from benchmarks.conversations.webrtc_calls import call  # needs quartet[webrtc]

    async with call(url, append_s, quiet) as session:
        yield session


TRANSPORTS: dict[str, Transport] = {"websocket": websocket, "live": live, "webrtc": webrtc}


def problem_of(heard: Heard) -> str | None:
    """Why an answer is none; None: it is one."""
    told = json.loads(heard.end.text)
    if heard.end.kind == "error":
        return f"{told['error']['code']}: {told['error']['message']}"
    if (done := told.get("response")) is not None and done["status"] not in ("completed", "incomplete"):
        return f"{done['status']}: {done['status_details']}"
    return None if heard.deltas else "an answer without sound"
