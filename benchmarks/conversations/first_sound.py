"""Time from the user's last sample to the answer's sound: by `/v1/realtime`, and by whole turns to chats."""

import asyncio
import base64
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.conversations.microphone import Lost, call
from benchmarks.conversations.utterances import Utterance
from benchmarks.traffic.client import Gateway

DECISION_S = 0.5  # of silence, which is server_vad's default
_LATEST_START_S = 2.0


@dataclass
class Turn:
    """One turn. Moments are seconds since the user's last sample.

    Attributes:
        stopped_s: when `speech_stopped` came; of a chat, when the client sent the turn.
        first_audio_s: when the first sound came.
        error: why there is none.
    """

    stopped_s: float = 0.0
    first_audio_s: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class Chat:
    """A turn of sound, as a streamed request; a prompt is the content of its message."""

    path = "/v1/chat/completions"

    def body(self, model: str, prompt: Any) -> dict[str, Any]:
        """Body of the POST."""
        message = {"role": "user", "content": prompt}
        spoken = {"modalities": ["text", "audio"], "audio": {"format": "pcm16"}, "stream": True}
        return {"model": model, "messages": [message], **spoken}


class Realtime:
    """A side that speaks into a session of `/v1/realtime`, a new one for each turn.

    Args:
        url: of a gateway.
        append_s: of sound in each append.
    """

    def __init__(self, url: str, append_s: float) -> None:
        self._url, self._append_s = url, append_s

    async def turn(self, said: Utterance) -> Turn:
        """One turn."""
        try:
            async with call(self._url, self._append_s) as caller:
                last_s = caller.say(said.samples) + said.seconds
                done = (await caller.until("response.done")).members["response"]
                stopped = await caller.until("input_audio_buffer.speech_stopped")
        except Lost as error:
            return Turn(error=str(error))
        sounds = [event.at_s for event in caller.events if event.kind == "response.output_audio.delta"]
        if done["status"] not in ("completed", "incomplete") or not sounds:
            return Turn(error=f"{done['status']}, {len(sounds)} pieces of sound: {done['status_details']}")
        return Turn(stopped.at_s - last_s, sounds[0] - last_s)


class WholeTurns:
    """A side that detects turns itself, and sends each to chat completions after as much silence as server_vad."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def turn(self, said: Utterance) -> Turn:
        """One turn."""
        last_s = time.perf_counter() + said.seconds
        await asyncio.sleep(said.seconds + DECISION_S)
        file = base64.b64encode(said.wav()).decode()
        exchange = await self._gateway.send([{"type": "input_audio", "input_audio": {"data": file, "format": "wav"}}])
        answer = exchange.answer()
        if answer.error or not answer.audio:
            return Turn(error=answer.error or "no sound")
        return Turn(exchange.sent_s - last_s, answer.audio[0][0] - last_s)


async def talk(
    take: Callable[[Utterance], Awaitable[Turn]],
    sessions: int,
    turns: Sequence[Utterance],
    progress: Callable[[], None],
) -> list[Turn]:
    """`sessions` users, who begin within two seconds, and take one of `turns` after the other until all are taken."""
    left, draw = iter(turns), random.Random(sessions)
    taken: list[Turn] = []

    async def user(begins_s: float) -> None:
        await asyncio.sleep(begins_s)
        for said in left:  # one iterator for all
            taken.append(await take(said))
            progress()

    latest_s = _LATEST_START_S if sessions > 1 else 0.0
    await asyncio.gather(*(user(draw.uniform(0, latest_s)) for _ in range(sessions)))
    return taken
