"""A talker behind gRPC, in this process."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from pathlib import Path
from typing import Self

import grpc
import numpy as np
import torch

from quartet.v1 import talker_pb2, talker_pb2_grpc
from services.common.rpc.call import Admission
from services.common.rpc.status import from_rpc_error
from services.common.stream.hub import StreamHub
from services.common.stream.tensors import to_torch
from services.talker.engine import TalkerEngine
from services.talker.model import load_talker
from services.talker.runner import TalkerRunner
from services.talker.servicer import TalkerServicer
from services.talker.speech import Speech
from services.talker.voices import load_voices
from tests.support.stage.replay import ReplayedOps
from tests.support.stage.streaming import CONSUMER

GUARD_S = 120.0


async def codes_of(speech: Speech) -> np.ndarray:
    """All codes of `speech`, (frames, groups) int32."""
    async with asyncio.timeout(GUARD_S):
        frames = [frames.numpy() async for frames in speech.frames()]
    return np.concatenate(frames) if frames else np.zeros((0, 0), np.int32)


async def requests(
    start: talker_pb2.SpeakStart, more: Iterable[str] | AsyncIterable[str] = ()
) -> AsyncIterator[talker_pb2.SpeakRequest]:
    """Those of a call whose text goes on with `more`."""
    yield talker_pb2.SpeakRequest(start=start)
    if isinstance(more, AsyncIterable):
        async for text in more:
            yield talker_pb2.SpeakRequest(text=text)
    else:
        for text in more:
            yield talker_pb2.SpeakRequest(text=text)


class ServedTalker:
    """The talker of a checkpoint, with `capturer` for its steps. Use as `async with`."""

    def __init__(self, checkpoint: Path, capturer: ReplayedOps | None = None) -> None:
        self.family, model = load_talker(str(checkpoint), torch.device("cpu"))
        self.engine = TalkerEngine(TalkerRunner(model, 4, 300, capturer))
        self.server, self.admission = grpc.aio.server(), Admission(max_running=4, max_queued=0)
        servicer = TalkerServicer(self.admission, StreamHub(), CONSUMER)
        servicer.engine, servicer.family = self.engine, self.family
        servicer.voices = load_voices(self.family, model)
        self.admission.open()
        talker_pb2_grpc.add_TalkerServiceServicer_to_server(servicer, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"

    async def __aenter__(self) -> Self:
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(self.address)
        self.stub = talker_pb2_grpc.TalkerServiceStub(self.channel)
        return self

    async def __aexit__(self, *_) -> None:
        await self.channel.close()
        await self.server.stop(0.5)
        self.engine.stop()

    async def call(
        self, start: talker_pb2.SpeakStart, more: Iterable[str] | AsyncIterable[str] = ()
    ) -> tuple[torch.Tensor, talker_pb2.SpeakSummary]:
        """Codes (frames, groups) of `start`, whose text goes on with `more`. Raises StageError."""
        parts, summary = [torch.zeros(0, self.family.spec.num_code_groups, dtype=torch.int32)], None
        try:
            async with asyncio.timeout(GUARD_S):
                async for response in self.stub.Speak(requests(start, more)):
                    if response.HasField("frames"):
                        parts.append(to_torch(response.frames.tensor))
                    elif response.HasField("summary"):
                        summary = response.summary
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        assert summary is not None
        return torch.cat(parts), summary
