"""Voices that the talker imitates, kept by their samples."""

import asyncio
import hashlib
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import torch

from services.common.engine.device import use_own_stream
from services.talker.family import TalkerFamily
from services.talker.inputs import SampleReader, Voice
from services.talker.model import TalkerModel

MOST_KEPT = 64


class Voices:
    """Hears each sample once, one at a time, while it is among the MOST_KEPT that were used last.

    `device` is the reader's. Its thread has a stream of its own there: on the engine's, a sample would wait for frames,
    and frames for it.
    """

    def __init__(self, reader: SampleReader, device: torch.device) -> None:
        self._reader, self.sample_rate_hz = reader, reader.sample_rate_hz
        self._kept: OrderedDict[bytes, Voice] = OrderedDict()
        # A cancelled call's sample is heard to its end.
        self._thread = ThreadPoolExecutor(1, "voices", initializer=use_own_stream, initargs=(device,))

    async def voice(self, samples: torch.Tensor) -> Voice:
        """The voice in `samples` (samples,) float32 on the CPU."""
        digest = await asyncio.to_thread(lambda: hashlib.sha256(samples.numpy().data).digest())
        voice = self._kept.get(digest)
        if voice is None:
            voice = await asyncio.get_running_loop().run_in_executor(self._thread, self._hear, digest, samples)
        self._kept[digest] = voice
        self._kept.move_to_end(digest)
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return voice

    def _hear(self, digest: bytes, samples: torch.Tensor) -> Voice:
        """In the thread, which only adds. A second request for the same sample finds it kept."""
        voice = self._kept.get(digest) or self._reader.read(samples)
        self._kept[digest] = voice
        return voice


def load_voices(family: TalkerFamily, talker: TalkerModel) -> Voices | None:
    """Voices for `talker`; None: the family imitates none."""
    if family.sample_reader is None:
        return None
    return Voices(family.sample_reader(talker.device, talker.dtype), talker.device)
