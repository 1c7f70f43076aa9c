"""Starts code2wav: `python -m services.code2wav --model DIR_OR_ID --port 50053`."""

import asyncio
import threading
from collections.abc import Callable

import structlog
import torch

from quartet.v1 import code2wav_pb2_grpc, server_info_pb2
from services.code2wav.config import Code2WavSettings
from services.code2wav.engine import DecodeEngine
from services.code2wav.execution import decide
from services.code2wav.family import DecoderSpec, load_decoder
from services.code2wav.servicer import Code2WavServicer
from services.code2wav.stream import Event, Failed, Samples
from services.common.engine.device import Accelerator, log_choices
from services.common.engine.process import keep_freed_memory
from services.common.stage import Stage, main

SERVICE = "quartet.v1.Code2WavService"
WARM_UP_TIMEOUT_S = 120.0

log = structlog.get_logger()


async def serve(stage: Stage, settings: Code2WavSettings) -> None:
    """Runs the stage until it is told to stop."""
    servicer = Code2WavServicer(stage.admission, stage.consumer)
    code2wav_pb2_grpc.add_Code2WavServiceServicer_to_server(servicer, stage.grpc)

    def describe(engine: DecodeEngine) -> server_info_pb2.GetServerInfoResponse:
        info = code2wav_info(engine.spec)
        return stage.describe(str(engine.decoder.dtype), str(engine.decoder.device), code2wav=info)

    await stage.serve(
        load=lambda: asyncio.to_thread(start_engine, settings, stage.fatal),
        warm_up=lambda engine: asyncio.to_thread(warm_up, engine, settings.max_frames_per_step + 1),
        describe=describe,
        bind=lambda engine, info: servicer.bind(engine),
    )


def start_engine(
    settings: Code2WavSettings, on_fatal: Callable[[Exception], object] = lambda error: None
) -> DecodeEngine:
    """The engine of this stage, loaded as `settings` say; not warmed up. Blocks until it is loaded.

    Raises:
        ValueError: no such device, no such checkpoint, no code2wav in it, or tensors that are missing, unknown or of
            another shape.
    """
    decoder = load_decoder(settings.model, settings.dtype, settings.device)
    execution = decide(settings.enforce_eager, Accelerator.of(decoder.device))
    log_choices(execution.choices)
    engine = DecodeEngine(
        decoder,
        max_streams=settings.max_running_requests,
        max_frames_per_step=settings.max_frames_per_step,
        lead_margin_ms=settings.lead_margin_ms,
        threads=settings.threads,
        capturer=execution.capturer(decoder.device),
        on_fatal=on_fatal,
    )
    log.info("state is reserved", slots=settings.max_running_requests, state_bytes=engine.state_bytes)
    return engine


def warm_up(engine: DecodeEngine, frames: int) -> None:
    """Decodes `frames` frames, the first alone; blocks until that is done.

    Raises:
        Exception: what the engine failed with.
        TimeoutError: it did not come back.
    """
    done = threading.Event()
    last: list[Event] = []

    def take(event: Event) -> None:
        if not isinstance(event, Samples):
            last.append(event)
            done.set()

    stream = engine.open(take)
    codes = torch.zeros(frames, engine.spec.num_code_groups, dtype=torch.int64)
    engine.put(stream, codes[:1])
    engine.put(stream, codes[1:])
    engine.finish(stream)
    if not done.wait(WARM_UP_TIMEOUT_S):
        raise TimeoutError(f"the warm-up took more than {WARM_UP_TIMEOUT_S:g} s")
    if isinstance(last[0], Failed):
        raise last[0].error


def code2wav_info(spec: DecoderSpec) -> server_info_pb2.Code2WavInfo:
    """This stage's part of the server info."""
    return server_info_pb2.Code2WavInfo(
        sample_rate_hz=spec.sample_rate_hz,
        samples_per_frame=spec.samples_per_frame,
        trimmed_samples=spec.trimmed_samples,
        num_code_groups=spec.num_code_groups,
    )


if __name__ == "__main__":
    loaded = Code2WavSettings.load()
    keep_freed_memory()
    main(loaded, "code2wav", SERVICE, serve, streams=False)
