"""Starts the talker: `python -m services.talker --model DIR_OR_ID`."""

import asyncio
from collections.abc import Callable

import torch

from quartet.v1 import server_info_pb2, talker_pb2_grpc
from services.common.engine.device import disable_cudnn_attention, engine_device, make_current
from services.common.engine.execution import Accelerator, log_choices
from services.common.stage import Stage, main
from services.talker.config import TalkerSettings
from services.talker.engine import TalkerEngine
from services.talker.execution import decide
from services.talker.loading import load_model
from services.talker.prompt import ThinkerPrompt
from services.talker.runner import TalkerRunner
from services.talker.sampling import resolve
from services.talker.servicer import TalkerServicer, talker_info
from services.talker.spec import TalkerSpec
from services.talker.speech import SpeechRequest

SERVICE = "quartet.v1.TalkerService"


async def serve(stage: Stage, settings: TalkerSettings) -> None:
    """Runs the stage until it is told to stop."""
    servicer = TalkerServicer(stage.admission, stage.hub, stage.consumer)
    talker_pb2_grpc.add_TalkerServiceServicer_to_server(servicer, stage.grpc)

    async def load() -> TalkerEngine:
        engine = await start_engine(settings, stage.fatal)
        stage.resources.callback(engine.close)
        return engine

    def describe(engine: TalkerEngine) -> server_info_pb2.GetServerInfoResponse:
        model = engine.runner.model
        rows, info = talker_info(engine, engine.runner.positions)
        return stage.server.describe(str(model.dtype), str(model.device), rows=rows, talker=info)

    await stage.serve(
        load=load,
        warm_up=warm_up,
        describe=describe,
        bind=lambda engine, info: servicer.bind(engine, len(engine.runner.model.text_table)),
    )


async def start_engine(
    settings: TalkerSettings, on_fatal: Callable[[BaseException], None] = lambda error: None
) -> TalkerEngine:
    """The engine of this stage, loaded as `settings` say; not warmed up.

    Raises:
        ValueError: no such device, no such checkpoint, no talker in it, or tensors that are missing, unknown or of
            another shape.
    """
    runner = await asyncio.to_thread(_load, settings)
    return TalkerEngine(runner, settings.prefill_chunk_positions, settings.max_frames_ahead, on_fatal)


def _load(settings: TalkerSettings) -> TalkerRunner:
    device = engine_device(settings.device)
    make_current(device)
    disable_cudnn_attention()
    model = load_model(settings.model, device, None if settings.dtype == "auto" else getattr(torch, settings.dtype))
    positions = min(settings.max_context_positions, model.spec.max_positions)
    execution = decide(settings.enforce_eager, Accelerator.of(device), str(model.dtype).removeprefix("torch."))
    log_choices(execution.choices)
    model.use_experts(execution.run_experts)
    slots = settings.max_running_requests
    return TalkerRunner(model, slots, positions, execution.capturer(device), execution.compiled_predictor)


async def warm_up(engine: TalkerEngine) -> None:
    """Speaks two frames of a one-token answer, greedily."""
    spec = engine.spec
    speech = engine.submit(
        SpeechRequest(
            prompt=_shortest_prompt(spec),
            text=(spec.tts_pad_id,),
            speaker=next(iter(spec.speakers)),
            sampling=resolve(spec.defaults, temperature=0, max_frames=2, seed=0),
        )
    )
    speech.finish_text()
    async for _ in speech.frames():
        pass


def _shortest_prompt(spec: TalkerSpec) -> ThinkerPrompt:
    user, assistant = [spec.im_start_id, spec.user_id], [spec.im_start_id, spec.assistant_id, spec.tts_pad_id]
    return ThinkerPrompt(torch.tensor(user + assistant), (), None)


if __name__ == "__main__":
    main(TalkerSettings.load(), "talker", SERVICE, serve)
