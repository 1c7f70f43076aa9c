"""The thinker's start-up: server, engine, one warm-up request."""

import asyncio

from quartet.v1 import server_info_pb2, thinker_pb2, thinker_pb2_grpc
from services.common.rpc.errors import Unavailable
from services.common.stage import Stage
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import Conversation, Message
from services.thinker.engine import ThinkerEngine
from services.thinker.output import offered_rows
from services.thinker.preprocess import Preprocessor
from services.thinker.request import sampling_params
from services.thinker.servicer import ThinkerServicer

SERVICE_NAME = thinker_pb2.DESCRIPTOR.services_by_name["ThinkerService"].full_name
# Requests in flight get the engine's own error before the process goes.
GRACE_S = 0.5


async def serve(stage: Stage, settings: ThinkerSettings) -> None:
    """Runs the stage until it is told to stop.

    Raises:
        Exception: the engine cannot start, or died.
    """
    servicer = ThinkerServicer(settings, stage.admission, stage.hub)
    thinker_pb2_grpc.add_ThinkerServiceServicer_to_server(servicer, stage.grpc)

    async def load() -> tuple[ThinkerEngine, Preprocessor]:
        engine = await ThinkerEngine.start(settings)
        stage.resources.push_async_callback(engine.close)
        preprocessor = Preprocessor(settings, engine.checkpoint, engine.renderer, engine.max_context_tokens)
        stage.resources.callback(preprocessor.close)
        return engine, preprocessor

    def bind(loaded: tuple[ThinkerEngine, Preprocessor], info: server_info_pb2.GetServerInfoResponse) -> None:
        servicer.bind(*loaded)
        watch = asyncio.create_task(_end_with(loaded[0], stage))
        stage.resources.callback(watch.cancel)

    await stage.serve(
        load=load,
        warm_up=lambda loaded: warm_up(*loaded),
        describe=lambda loaded: _server_info(stage, loaded[0]),
        bind=bind,
    )


async def warm_up(engine: ThinkerEngine, preprocessor: Preprocessor) -> None:
    prompt = await preprocessor.prepare(Conversation([Message("user", ["Hello"])]))
    request = thinker_pb2.SamplingParameters(max_tokens=2, ignore_eos=True)
    params = sampling_params(request, engine.sampling_defaults, engine.checkpoint.vocab_size, None)
    async for _ in engine.generate("warm-up", prompt, params):
        pass


async def _end_with(engine: ThinkerEngine, stage: Stage) -> None:
    await engine.died()
    await asyncio.sleep(GRACE_S)
    stage.fatal(Unavailable("the thinker's engine died"))


def _server_info(stage: Stage, engine: ThinkerEngine) -> server_info_pb2.GetServerInfoResponse:
    checkpoint = engine.checkpoint
    return stage.describe(
        engine.dtype,
        engine.device,
        rows=[server_info_pb2.RowsInfo(name=name) for name in offered_rows(engine.row_kinds)],
        thinker=server_info_pb2.ThinkerInfo(
            max_context_tokens=engine.max_context_tokens,
            accept_hidden_layer=checkpoint.accept_hidden_layer,
            input_modalities=list(checkpoint.placeholders),
        ),
    )
