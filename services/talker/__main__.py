"""Starts the talker: `python -m services.talker --model DIR_OR_ID`."""

import asyncio

import torch

from quartet.v1 import server_info_pb2, talker_pb2_grpc
from services.common.engine.device import Accelerator, CudaGraphs, captures, log_choices, prepared_device
from services.common.stage import Stage, main
from services.common.stream.rows import CODES
from services.talker.config import TalkerSettings
from services.talker.engine import TalkerEngine
from services.talker.execution import (
    cache_attention,
    choices,
    compiles_predictor,
    experts,
    lacks_in_place,
    step_kernels,
)
from services.talker.family import TalkerFamily
from services.talker.inputs import Prompt, Text
from services.talker.model import load_talker
from services.talker.runner import TalkerRunner
from services.talker.sampling import resolve
from services.talker.servicer import TalkerServicer, talker_info
from services.talker.speech import SpeechRequest
from services.talker.varlen import refusal
from services.talker.voices import load_voices

SERVICE = "quartet.v1.TalkerService"
_WARM_UP_ROWS = 11  # no more than the least `max_context_positions` less a frame


async def serve(stage: Stage, settings: TalkerSettings) -> None:
    servicer = TalkerServicer(stage.admission, stage.hub, stage.consumer)
    talker_pb2_grpc.add_TalkerServiceServicer_to_server(servicer, stage.grpc)

    async def start() -> server_info_pb2.GetServerInfoResponse:
        family, runner = await stage.load(asyncio.to_thread(load, settings))
        engine = TalkerEngine(runner, on_fatal=stage.fatal)
        stage.resources.callback(engine.stop)
        await warm_up(engine)
        model = engine.runner.model
        voices = await stage.load(asyncio.to_thread(load_voices, family, model))
        servicer.engine, servicer.family, servicer.voices = engine, family, voices
        rows, info = [server_info_pb2.RowsInfo(name=CODES)], talker_info(family, voices, engine.runner.positions)
        return stage.describe(str(model.dtype), str(model.device), rows=rows, talker=info)

    await stage.serve(start)


def load(settings: TalkerSettings) -> tuple[TalkerFamily, TalkerRunner]:
    """What this stage's engine runs. Blocks.

    Raises:
        ValueError: no such device, checkpoint or talker, or tensors that are missing, unknown or of another shape.
    """
    device = prepared_device(settings.device)
    dtype = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
    family, model = load_talker(settings.model, device, dtype)
    positions = min(settings.max_context_positions, model.spec.max_positions)
    accelerator, named = Accelerator.of(device), str(model.dtype).removeprefix("torch.")
    lack = lacks_in_place(settings.compile, accelerator, named)
    if not lack:
        lack = refusal(cache_attention(lack), model.spec.talker, positions + 1, model.dtype, device)
    log_choices(choices(settings, accelerator, named, lack))
    model.use_experts(experts(accelerator, named))
    capturer = CudaGraphs(device) if captures(settings.compile, accelerator) else None
    compiled = compiles_predictor(settings.compile, accelerator)
    kernels = step_kernels(settings.compile, accelerator)
    attention = cache_attention(lack)
    slots = settings.max_running_requests
    return family, TalkerRunner(model, slots, positions, capturer, compiled, kernels, attention)


async def warm_up(engine: TalkerEngine) -> None:
    """Speaks two frames after a prompt of any text, greedily."""
    spec = engine.spec
    prompt = Prompt(
        text_ids=torch.full((_WARM_UP_ROWS,), spec.after_text[-1]),
        codes=torch.full((_WARM_UP_ROWS,), -1),
        positions=torch.arange(_WARM_UP_ROWS)[:, None].expand(-1, 3),
    )
    sampling = resolve(spec.defaults, temperature=0, max_frames=2, seed=0)
    speech = engine.submit(SpeechRequest(prompt, Text(spec.after_text[-1:]), sampling))
    speech.finish_text()
    async for _ in speech.frames():
        pass


if __name__ == "__main__":
    main(TalkerSettings.load(), "talker", SERVICE, serve)
