"""Users of `/v1/realtime` who do anything, and leave anyhow."""

import asyncio
import random
from collections.abc import Sequence

import numpy as np

from benchmarks.conversations.utterances import silence
from benchmarks.systems.gateways import GatewayProcess
from tests.support.clients.realtime_client import RealtimeClient
from tests.support.systems.realtime import conversation, send

_AT_A_TIME = 10
_DELTA = "response.output_audio.delta"


async def chaos(gateway: GatewayProcess, key: str, sounds: Sequence[np.ndarray], sessions: int, seed: int) -> None:
    """`sessions` sessions, ten at a time. Answers of `gateway` do not end by themselves."""
    draw, left = random.Random(seed), iter(range(sessions))

    async def user() -> None:
        for _ in left:  # one iterator for all
            async with conversation(gateway, key) as client:
                await _some_of(client, sounds, draw)
                if draw.random() < 0.7:  # the others say goodbye
                    client.socket.transport.abort()

    await asyncio.gather(*(user() for _ in range(_AT_A_TIME)))


async def _some_of(client: RealtimeClient, sounds: Sequence[np.ndarray], draw: random.Random) -> None:
    """What a user does, up to a moment drawn by chance."""
    sound = sounds[draw.randrange(len(sounds))]
    match draw.randrange(6):
        case 0:  # says nothing
            return
        case 1:  # leaves within a word
            await send(client, sound[: draw.randrange(2400, len(sound))])
        case 2:  # within a pause, in which an answer was begun
            await send(client, sound, silence(draw.uniform(0.2, 0.45)))
        case 3:  # is interrupted, interrupts, and leaves
            await send(client, sound, silence(1.0))
            await client.until(_DELTA)
            await send(client, sound)
            await client.until("response.done")
        case 4:  # cancels, or leaves within the answer
            await client.say("Tell me a story.")
            await client.send("response.create")
            for _ in range(draw.randrange(4)):
                await client.until(_DELTA)
            if draw.random() < 0.5:
                await client.send("response.cancel")
                await client.until("response.done")
        case 5:  # everything at once
            await client.say("Tell me two stories.")
            for _ in range(2):
                await client.send("response.create", response={"conversation": "none"})
            await client.send("response.create")
            await client.send("input_audio_buffer.commit")  # there is none
            await send(client, sound, silence(0.3))
            await client.until(_DELTA)
