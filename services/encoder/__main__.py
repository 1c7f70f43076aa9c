"""Starts the encoder: `python -m services.encoder --model DIR_OR_ID --port 50055`."""

import asyncio

import structlog

from quartet.v1 import dit_pb2, encoder_pb2_grpc, server_info_pb2
from services.common.stage import Stage, main
from services.diffusion.model_info import dit_info, warm_up_side
from services.diffusion.pipelines import silence_libraries
from services.diffusion.request import resolve
from services.encoder.config import EncoderSettings
from services.encoder.engine import EncoderEngine
from services.encoder.servicer import EncoderServicer

SERVICE = "quartet.v1.EncoderService"

log = structlog.get_logger()


async def serve(stage: Stage, settings: EncoderSettings) -> None:
    """Runs the stage until it is told to stop."""
    servicer = EncoderServicer(stage.admission, stage.hub, settings)
    encoder_pb2_grpc.add_EncoderServiceServicer_to_server(servicer, stage.grpc)

    def describe(engine: EncoderEngine) -> server_info_pb2.GetServerInfoResponse:
        info = server_info_pb2.EncoderInfo(
            pipeline=type(engine.models.pipeline).__name__, models=engine.names, needs_seed=engine.draws_prior_tokens
        )
        log.info("loaded", pipeline=info.pipeline, models=list(info.models))
        return stage.describe(str(engine.dtype), str(engine.models.device), encoder=info)

    await stage.serve(
        load=lambda: asyncio.to_thread(EncoderEngine, settings),
        warm_up=lambda engine: warm_up(engine, settings),
        describe=describe,
        bind=lambda engine, info: servicer.bind(engine),
    )


async def warm_up(engine: EncoderEngine, settings: EncoderSettings) -> None:
    """Reads one prompt, if the pipeline reads prompts without pictures.

    Raises:
        StageError: it failed.
    """
    if engine.models.family.needs_image:
        return
    info = dit_info(engine.models, settings)
    side = warm_up_side(info)
    start = dit_pb2.DitStart(prompt="warm-up", seed=0, width=side, height=side)
    plan = resolve(start, info.tasks[0], [], None, engine.models, info)
    await engine.encode(plan.outputs, asyncio.get_running_loop())


if __name__ == "__main__":
    loaded = EncoderSettings.load()
    silence_libraries()
    main(loaded, "encoder", SERVICE, serve)
