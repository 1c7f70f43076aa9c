"""Starts code2wav: `python -m services.code2wav --model DIR_OR_ID --port 50053`."""

import asyncio
import queue
from collections.abc import Callable

import torch

from quartet.v1 import code2wav_pb2_grpc, server_info_pb2
from services.code2wav.config import Code2WavSettings
from services.code2wav.engine import DecodeEngine
from services.code2wav.execution import choices
from services.code2wav.family import DecoderSpec, load_decoder
from services.code2wav.servicer import Code2WavServicer
from services.code2wav.stream import Event, Samples
from services.common.engine.device import Accelerator, CudaGraphs, captures, log_choices
from services.common.engine.process import keep_freed_memory
from services.common.stage import Stage, main

SERVICE = "quartet.v1.Code2WavService"
WARM_UP_TIMEOUT_S = 120.0


async def serve(stage: Stage, settings: Code2WavSettings) -> None:
    servicer = Code2WavServicer(stage.admission, stage.consumer)
    code2wav_pb2_grpc.add_Code2WavServiceServicer_to_server(servicer, stage.grpc)

    async def start() -> server_info_pb2.GetServerInfoResponse:
        engine = await stage.load(asyncio.to_thread(start_engine, settings, stage.fatal))
        await asyncio.to_thread(warm_up, engine, settings.max_frames_per_step + 1)
        servicer.engine = engine
        decoder = engine.decoder
        return stage.describe(str(decoder.dtype), str(decoder.device), code2wav=info_of(engine.spec))

    await stage.serve(start)


def info_of(spec: DecoderSpec) -> server_info_pb2.Code2WavInfo:
    info = server_info_pb2.Code2WavInfo(
        sample_rate_hz=spec.sample_rate_hz,
        samples_per_frame=spec.samples_per_frame,
        trimmed_samples=spec.trimmed_samples,
        num_code_groups=spec.num_code_groups,
        lookahead_frames=spec.lookahead_frames,
        voices=spec.voices,
        decodes_whole=spec.decodes_whole,
    )
    if spec.windows is not None and not spec.decodes_whole:
        info.window_frames.extend(spec.windows.sizes)
        info.window_past_frames, info.window_future_frames = spec.windows.past, spec.windows.future
    return info


def start_engine(
    settings: Code2WavSettings, on_fatal: Callable[[BaseException], object] = lambda error: None
) -> DecodeEngine:
    """The decoder's engine, not warmed up. Blocks. Raises as `load_decoder`."""
    decoder = load_decoder(settings.model, settings.dtype, settings.device, settings.windows)
    accelerator = Accelerator.of(decoder.device)
    log_choices(choices(settings, accelerator, str(decoder.dtype)))
    return DecodeEngine(
        decoder,
        max_streams=settings.max_running_requests,
        max_frames_per_step=settings.max_frames_per_step,
        capturer=CudaGraphs(decoder.device) if captures(settings.compile, accelerator) else None,
        on_fatal=on_fatal,
    )


def warm_up(engine: DecodeEngine, frames: int) -> None:
    """Decodes `frames` frames, the first alone. Blocks.

    Raises:
        Exception: the engine's failure.
        TimeoutError: a step took too long.
    """
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    stream = engine.open(events.put)
    codes = torch.zeros(frames, engine.spec.num_code_groups, dtype=torch.int64)
    engine.put(stream, codes[:1])
    engine.put(stream, codes[1:])
    engine.finish(stream)
    try:
        while isinstance(event := events.get(timeout=WARM_UP_TIMEOUT_S), Samples):
            pass
    except queue.Empty:
        raise TimeoutError(f"a step of the warm-up took more than {WARM_UP_TIMEOUT_S:g} s") from None
    if isinstance(event, Exception):
        raise event


if __name__ == "__main__":
    loaded = Code2WavSettings.load()
    keep_freed_memory()
    main(loaded, "code2wav", SERVICE, serve, streams=False)
