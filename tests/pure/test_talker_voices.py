"""The voices that a talker has heard: each once, one at a time, whoever leaves meanwhile."""

import asyncio
import threading

import torch

from services.talker.inputs import Voice
from services.talker.voices import MOST_KEPT, Voices
from tests.support.clock import until

RATE_HZ = 16_000


class Reader:
    """Hears a voice in samples as soon as it may."""

    sample_rate_hz = RATE_HZ

    def __init__(self) -> None:
        self.may = threading.Event()
        self.read_now = self.most_at_once = self.count = 0

    def read(self, samples: torch.Tensor) -> Voice:
        self.read_now, self.count = self.read_now + 1, self.count + 1
        self.most_at_once = max(self.most_at_once, self.read_now)
        assert self.may.wait(60)
        self.read_now -= 1
        if samples[0] < 0:
            raise ValueError("no voice")
        return Voice(samples[:1], torch.zeros(1, 1, dtype=torch.int64))


def sample(number: float) -> torch.Tensor:
    return torch.full((RATE_HZ,), number)


async def test_who_leaves_does_not_have_two_heard_at_once() -> None:
    reader = Reader()
    voices = Voices(reader, torch.device("cpu"))
    gone = asyncio.create_task(voices.voice(sample(1)))
    await until(lambda: reader.read_now == 1)
    gone.cancel()
    await asyncio.wait([gone])
    asked = [asyncio.create_task(voices.voice(sample(number))) for number in (1, 2, 2)]
    reader.may.set()
    heard = await asyncio.gather(*asked)
    assert [float(voice.vector[0]) for voice in heard] == [1, 2, 2]
    assert (reader.count, reader.most_at_once) == (2, 1)


async def test_a_known_voice_waits_for_no_other() -> None:
    reader = Reader()
    voices = Voices(reader, torch.device("cpu"))
    reader.may.set()
    known = await voices.voice(sample(1))
    reader.may.clear()
    other = asyncio.create_task(voices.voice(sample(2)))
    await until(lambda: reader.read_now == 1)
    assert await voices.voice(sample(1)) is known
    assert not other.done()
    reader.may.set()
    await other


async def test_those_asked_for_last_are_kept() -> None:
    reader = Reader()
    voices = Voices(reader, torch.device("cpu"))
    reader.may.set()
    for number in range(MOST_KEPT + 1):
        await voices.voice(sample(number))
        await voices.voice(sample(0))
    await voices.voice(sample(2))
    assert reader.count == MOST_KEPT + 1
    await voices.voice(sample(1))
    assert reader.count == MOST_KEPT + 2


async def test_an_error_is_told_and_ends_nothing() -> None:
    reader = Reader()
    voices = Voices(reader, torch.device("cpu"))
    reader.may.set()
    results = await asyncio.gather(voices.voice(sample(-1)), voices.voice(sample(1)), return_exceptions=True)
    assert isinstance(results[0], ValueError)
    assert isinstance(results[1], Voice)
