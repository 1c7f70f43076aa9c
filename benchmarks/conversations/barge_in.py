"""How soon an answer is silent when its user begins to speak, while all others' answers go on."""

import asyncio
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import grpc

from benchmarks.conversations.microphone import Caller, Lost, call
from benchmarks.conversations.utterances import Utterance
from quartet.v1 import server_info_pb2, server_info_pb2_grpc

_POLL_S = 0.002
_STARTED, _DELTA = "input_audio_buffer.speech_started", "response.output_audio.delta"
_HEARD_S = 1.0  # of an answer, at most, before its user speaks


@dataclass
class Silences:
    """Seconds from when the client has `speech_started`.

    Attributes:
        sound_s: until the last sound of the answer came; 0 if none came after it.
        done_s: until its `response.done` came.
        idle_s: until no stage ran or queued anything, where all users spoke at the same time: from the last one's.
            inf: not before they were answered again.
    """

    sound_s: list[float] = field(default_factory=list)
    done_s: list[float] = field(default_factory=list)
    idle_s: list[float] = field(default_factory=list)


class Stages:
    """Reads the load of stages.

    Args:
        addresses: by name.
    """

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self._channels = [grpc.aio.insecure_channel(address) for address in addresses.values()]

    async def until_idle(self) -> float:
        """Returns when none has anything to do: the `time.perf_counter` at which the last of them said so first."""
        return max(await asyncio.gather(*(self._idle(channel) for channel in self._channels)))

    async def _idle(self, channel: grpc.aio.Channel) -> float:
        stub = server_info_pb2_grpc.ServerInfoServiceStub(channel)
        while True:
            load = await stub.GetLoad(server_info_pb2.GetLoadRequest())
            if not load.running + load.queued:
                return time.perf_counter()
            await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        """Closes its channels."""
        for channel in self._channels:
            await channel.close()


async def barge_in(
    url: str,
    addresses: Mapping[str, str],
    sessions: int,
    rounds: int,
    turns: Sequence[Utterance],
    append_s: float,
    progress: Callable[[], None],
) -> Silences:
    """Sessions whose answers never end of themselves. In each round every user speaks into the answer, at moments of
    his own; in another round at the end, and `rounds // 4` more, all at the same moment.

    Raises:
        Lost: a session, or the end of an answer that should have none.
    """
    silences, draw, stages = Silences(), random.Random(0), Stages(addresses)
    async with AsyncExitStack() as exits:
        exits.push_async_callback(stages.close)
        callers = [await exits.enter_async_context(call(url, append_s)) for _ in range(sessions)]
        for caller in callers:
            caller.say(turns[0].samples)
        await asyncio.gather(*(caller.until(_DELTA) for caller in callers))

        async def user(caller: Caller) -> None:
            for number in range(rounds):
                await asyncio.sleep(draw.uniform(0, _HEARD_S))
                await _interrupt(caller, turns[number % len(turns)], silences)
                progress()

        await asyncio.gather(*(user(caller) for caller in callers))
        for number in range(1 + rounds // 4):
            said = turns[number % len(turns)]
            speaking = [asyncio.create_task(_interrupt(caller, said, silences)) for caller in callers]
            marks = [len(caller.events) for caller in callers]
            started = [await caller.until(_STARTED, since=mark) for caller, mark in zip(callers, marks, strict=True)]
            idle, all_spoke = asyncio.create_task(stages.until_idle()), asyncio.gather(*speaking)
            await asyncio.wait([idle, all_spoke], return_when=asyncio.FIRST_COMPLETED)
            idle_s = idle.result() if idle.done() else math.inf  # the next answers are under way
            idle.cancel()
            silences.idle_s.append(max(0.0, idle_s - max(event.at_s for event in started)))
            await all_spoke
            progress()
    return silences


async def _interrupt(caller: Caller, said: Utterance, silences: Silences) -> None:
    """Speaks into an answer, and returns when the next one sounds."""
    since = len(caller.events)
    caller.say(said.samples)
    started = await caller.until(_STARTED, since=since)
    done = await caller.until("response.done", since=since)
    ended = caller.events.index(done)
    if done.members["response"]["status_details"]["type"] != "cancelled":
        raise Lost("an answer had ended before it was interrupted; it should have no end")
    sounds = [event.at_s for event in caller.events[since:ended] if event.kind == _DELTA]
    silences.sound_s.append(max(0.0, max(sounds, default=0.0) - started.at_s))
    silences.done_s.append(done.at_s - started.at_s)
    answer = await caller.until(_DELTA, "response.done", since=ended + 1)
    if answer.kind != _DELTA:
        raise Lost(f"no answer: {answer.members['response']['status_details']}")
