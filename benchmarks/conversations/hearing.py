"""What it costs to listen: the detector alone, and a gateway with many sessions that send sound."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.conversations.microphone import call
from benchmarks.conversations.utterances import RATE_HZ, Utterance, silence
from benchmarks.systems.processes import Groups
from gateway.dialects.realtime.audio import MODEL_RATE_HZ, InputAudioStream
from gateway.listening.detector import Detectors

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PIECE_S = 0.1
_PAUSE_S = 8.0  # between what a user says and says again


@dataclass(frozen=True)
class Cost:
    """CPU time of a gateway while sessions send sound.

    Attributes:
        sessions: how many.
        wall_s: how long.
        cpu_s: user and system time of the gateway, all threads.
        loop_s: of these its event loop's.
        detector_s: of these the busiest other thread's, which is the detector's.
        client_s: of the client, on the same cores.
    """

    sessions: int
    wall_s: float
    cpu_s: float
    loop_s: float
    detector_s: float
    client_s: float


async def detector_ms_per_s(sessions: int, seconds: float, said: Utterance) -> float:
    """CPU milliseconds of this process for a second of one session's sound, in the detector and its queue; sound of
    `sessions` comes in turn, in pieces of 100 ms."""
    reader = InputAudioStream("audio/pcm")
    heard = np.concatenate([reader.add(said.samples.tobytes()), reader.flush()])
    pieces = np.resize(heard, round(seconds * MODEL_RATE_HZ)).reshape(-1, round(_PIECE_S * MODEL_RATE_HZ))
    with closing(Detectors()) as detectors:
        users = [detectors.open() for _ in range(sessions)]
        await asyncio.gather(*(user.add(pieces[0]) for user in users))  # makes their copies of the model
        before_s = time.process_time()
        for piece in pieces:
            await asyncio.gather(*(user.add(piece) for user in users))
        return 1000 * (time.process_time() - before_s) / (seconds * sessions)


async def listen(
    url: str, pid: int, sessions: int, seconds: float, turns: Sequence[Utterance], progress: Callable[[], None]
) -> Cost:
    """Sessions that send sound and get no answers: a turn, then seconds of silence. Raises Lost."""
    quiet = {"audio": {"input": {"turn_detection": {"type": "server_vad", "create_response": False}}}}
    async with AsyncExitStack() as exits:
        callers = [await exits.enter_async_context(call(url, _PIECE_S, quiet)) for _ in range(sessions)]
        for number, caller in enumerate(callers):
            said = turns[number % len(turns)].samples
            lead, cycle = silence(_PAUSE_S * number / sessions), [said, silence(_PAUSE_S)]
            length = round((seconds + 2) * RATE_HZ)
            caller.say(np.concatenate([lead, np.resize(np.concatenate(cycle), length)])[:length])
        await asyncio.sleep(1)
        groups, began_s = Groups({"gateway": pid}), time.perf_counter()
        before, own_s, threads = groups.cpu_s()["gateway"], time.process_time(), _threads_s(pid)
        for _ in range(round(seconds)):
            await asyncio.sleep(1)
            progress()
        wall_s, used_s = time.perf_counter() - began_s, groups.cpu_s()["gateway"] - before
        client_s = time.process_time() - own_s
        after = {thread: spent - threads.get(thread, 0.0) for thread, spent in _threads_s(pid).items()}
    loop_s = after.pop(pid)
    return Cost(sessions, wall_s, used_s, loop_s, max(after.values(), default=0.0), client_s)


def _threads_s(pid: int) -> dict[int, float]:
    """Seconds of CPU time of each thread of a process, by id; the first one's is `pid`."""
    spent: dict[int, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        spent[int(task.name)] = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return spent
