"""`quartet.v1.DitService`: messages in, engine calls, messages out."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Any

import grpc
import torch

from quartet.v1 import dit_pb2, dit_pb2_grpc, server_info_pb2
from services.common.errors import InvalidInput, require
from services.common.media.decoders import Decoders
from services.common.rpc.call import Admission, serve_call
from services.common.rpc.requests import first_start
from services.common.stream.consumer import StreamConsumer
from services.common.stream.tensors import MAX_INLINE_BYTES, to_message
from services.diffusion.checks import check
from services.diffusion.conditioning_stream import read_conditioning
from services.diffusion.images import decode_apart, read_files
from services.diffusion.request import OutputSpec, resolve
from services.dit.config import DitSettings
from services.dit.engine import DitEngine
from services.dit.output import VIDEO_DIMENSIONS, Done, Encoded, Event, Failed, Preview, Progress, Started, Thoughts

Requests = AsyncIterator[dit_pb2.DitServiceGenerateRequest]
Response = dit_pb2.DitServiceGenerateResponse


class DitServicer(dit_pb2_grpc.DitServiceServicer):
    """Serves requests by `engine`, which is set once it is loaded, before `admission` opens."""

    def __init__(self, admission: Admission, consumer: StreamConsumer, settings: DitSettings) -> None:
        self._admission, self._consumer, self._settings = admission, consumer, settings
        self.decoders = Decoders(settings.decoding_memory_bytes, settings.max_decoding_s)
        self.engine: DitEngine

    async def Generate(self, request_iterator: Requests, context: grpc.aio.ServicerContext) -> AsyncIterator[Response]:
        start: dit_pb2.DitStart = await first_start(request_iterator, context)
        async with serve_call("dit", start.request_id, context, self._admission) as call:
            task = check(start, self.engine.models.info)
            outputs = await self._resolve(start, request_iterator)
            rate = outputs[0].frames_per_second
            seed, steps, count = outputs[0].seed, outputs[0].steps, len(outputs)
            started = dit_pb2.DitStarted(task=task, seed=seed, count=count, num_inference_steps=steps)
            yield Response(started=started)
            thought = 0  # characters of thoughts, which all outputs share
            run = _Run(self.engine, outputs, start.progress_interval_ms / 1000)
            try:
                async for output, event in run.events():
                    match event:
                        case Failed(error):
                            raise error
                        case Started():
                            call.timings.mark_started()
                        case Thoughts(text):
                            if piece := text[thought:]:
                                yield Response(thoughts=dit_pb2.DitThoughts(text=piece))
                            thought = max(thought, len(text))
                        case Encoded():
                            call.timings.mark_prefilled()
                        case Progress(step, of_steps):
                            progress = dit_pb2.DitProgress(output=output, step=step, num_inference_steps=of_steps)
                            yield Response(progress=progress)
                        case Preview(step, pixels):
                            index = sum(other < step for other in outputs[output].preview_steps)
                            message = to_message(pixels)
                            preview = dit_pb2.DitPreview(output=output, index=index, step=step, pixels=message)
                            yield Response(preview=preview)
                        case Done():
                            call.timings.mark_output()
                            pieces = _pieces(output, event, self.engine.models.info, rate)
                            while piece := await asyncio.to_thread(next, pieces, None):
                                yield Response(piece=piece)
            finally:
                run.cancel()
                call.set(outputs=count, steps=run.steps, mean_batch=round(run.mean_batch, 2))
            timings = call.timings.to_message()
            facts = {"count": count, "steps": run.steps, "mean_batch": run.mean_batch}
            yield Response(summary=dit_pb2.DitSummary(**facts, timings=timings))

    async def _resolve(self, start: dit_pb2.DitStart, requests: Requests) -> list[OutputSpec]:
        models, info = self.engine.models, self.engine.models.info
        has_source = start.HasField("source")
        if info.needs_source and not has_source:
            raise InvalidInput("source", "is required: this diffusion stage has no text encoders")
        require(info.needs_source or not has_source, "source", "is not taken: leave it out")
        files = await read_files(start, requests, self._settings)
        given = await read_conditioning(self._consumer, start, models.device) if has_source else []
        pictures = await decode_apart(files, start, info, self._settings, self.decoders)
        return await asyncio.to_thread(resolve, start, pictures, models, info, given)


class _Run:
    """A request's outputs in the engine.

    Args:
        interval_s: least time between two reports of an output's progress.

    Attributes:
        steps: denoising steps done, of all outputs.
    """

    def __init__(self, engine: DitEngine, outputs: Sequence[OutputSpec], interval_s: float) -> None:
        self.steps = 0
        self._batches = 0
        self._interval_s, self._reported_s = interval_s, [float("-inf")] * len(outputs)
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._engine, self._pending = engine, len(outputs)
        self._loop = asyncio.get_running_loop()
        self._outputs = [engine.submit(spec, partial(self._hear, i)) for i, spec in enumerate(outputs)]

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """(output, event), until the last is done."""
        while self._pending:
            output, event = await self._events.get()
            self._pending -= isinstance(event, Done)
            yield output, event

    def _hear(self, output: int, event: Event) -> None:
        """Counts steps and passes on what the caller gets. In the engine's thread."""
        if isinstance(event, Progress):
            self.steps += 1
            self._batches += event.batch
            now = time.monotonic()
            if event.step < event.steps and now - self._reported_s[output] < self._interval_s:
                return
            self._reported_s[output] = now
        self._loop.call_soon_threadsafe(self._events.put_nowait, (output, event))

    @property
    def mean_batch(self) -> float:
        """Mean number of outputs in a step."""
        return self._batches / self.steps if self.steps else 0.0

    def cancel(self) -> None:
        for output in self._outputs:
            self._engine.cancel(output)


def _pieces(output: int, made: Done, info: server_info_pb2.DitInfo, frame_rate: float) -> Iterator[dit_pb2.DitPiece]:
    """What was made, its soundtrack first. `frame_rate`: of a video."""
    if made.soundtrack is not None:
        yield from _parts(made.soundtrack, output=output, sample_rate_hz=info.soundtrack_rate_hz)
    rates: dict[str, float] = {"sample_rate_hz": info.sample_rate_hz}
    if made.data.dim() == VIDEO_DIMENSIONS:  # a model of videos may make images, too
        rates["frames_per_second"] = frame_rate
    yield from _parts(made.data, output=output, **rates)


def _parts(data: torch.Tensor, **facts: Any) -> Iterator[dit_pb2.DitPiece]:
    """`data` in messages of at most 4 MiB, or of one row, frame or sample, with `facts`. Without torch's operations:
    see `start_engine` about threads."""
    entries = max(1, MAX_INLINE_BYTES // max(1, data[:1].numel() * data.element_size()))
    for first in range(0, data.shape[0], entries):
        part = data[first : first + entries]
        part = torch.from_numpy(part.numpy().clip(-1, 1)) if facts["sample_rate_hz"] else part
        yield dit_pb2.DitPiece(first=first, total=data.shape[0], data=to_message(part), **facts)
