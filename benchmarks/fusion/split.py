"""The three services, called over gRPC as the gateway calls them, and without HTTP."""

import asyncio
import contextlib
import time
import uuid
from typing import Self

from benchmarks.traffic.answer import Answer
from benchmarks.traffic.client import PCM16_BYTES
from cli.plan import PIPELINE
from gateway.pipeline.config import load_pipeline
from gateway.pipeline.events import AudioDelta, Finished, TextDelta
from gateway.pipeline.pipeline import Pipeline
from gateway.pipeline.run import Job, run, speech
from quartet.v1 import talker_pb2, thinker_pb2

_TIMEOUT_S = 600.0
_READY_TIMEOUT_S = 30.0


class Split:
    """Services that run elsewhere. Make it with `start`."""

    def __init__(self, stages: Pipeline, stack: contextlib.AsyncExitStack) -> None:
        self._stages, self._stack = stages, stack

    @classmethod
    async def start(cls, addresses: dict[str, str]) -> Self:
        """Connects to the stages at `addresses`, by name.

        Raises:
            TimeoutError: they do not serve.
        """
        stack = contextlib.AsyncExitStack()
        # Their health is asked once: checks in the background are the gateway's, not of what is compared.
        stages = await stack.enter_async_context(Pipeline(load_pipeline(PIPELINE, addresses), 3600.0, 5.0))
        async with asyncio.timeout(_READY_TIMEOUT_S):
            while not stages.ready:  # noqa: ASYNC110  there is no event for it
                await asyncio.sleep(0.05)
        return cls(stages, stack)

    @property
    def sample_rate_hz(self) -> int:
        """Of the audio."""
        code2wav = self._stages.info("code2wav")
        assert code2wav
        return code2wav.sample_rate_hz

    async def close(self) -> None:
        """Closes the channels."""
        await self._stack.aclose()

    async def answer(self, prompt: str, tokens: int, frames: int) -> tuple[Answer, bytes]:
        """One greedy spoken answer and its PCM16 samples."""
        answer, pcm16 = Answer(prompt, time.perf_counter(), 0.0), b""
        start = thinker_pb2.GenerateStart(
            sampling=thinker_pb2.SamplingParameters(temperature=0, max_tokens=tokens),
        )
        start.messages.add(role="user").content.add(text=prompt)
        speak = talker_pb2.SpeakStart(sampling=talker_pb2.TalkerSampling(temperature=0, max_frames=frames))
        job = Job(uuid.uuid4().hex, {"thinker": start, **speech(speak)})
        async for _, event in run(self._stages, [job], _TIMEOUT_S):
            match event:
                case TextDelta(delta):
                    answer.tokens += len(delta.token_ids)
                    if delta.text:
                        answer.text += delta.text
                        answer.text_s.append(time.perf_counter())
                case AudioDelta(piece):
                    answer.audio.append((time.perf_counter(), len(piece) // PCM16_BYTES))
                    pcm16 += piece
                case Finished(talker=talker) if talker:
                    answer.frames = talker.frames
        answer.done_s = time.perf_counter()
        return answer, pcm16
