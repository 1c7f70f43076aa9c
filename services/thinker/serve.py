"""The thinker's start-up: server, engine, one warm-up request."""

import asyncio
import contextlib

from quartet.v1 import server_info_pb2, thinker_pb2, thinker_pb2_grpc
from services.common.rpc.errors import Unavailable
from services.common.rpc.server import StageServer
from services.thinker.capture import offered_rows
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import Conversation, Message
from services.thinker.engine import ThinkerEngine
from services.thinker.preprocess import Preprocessor
from services.thinker.sampling import sampling_params
from services.thinker.servicer import STAGE, ThinkerServicer

SERVICE_NAME = thinker_pb2.DESCRIPTOR.services_by_name["ThinkerService"].full_name
# Requests in flight get the engine's own error before the process goes.
GRACE_S = 0.5


async def serve(settings: ThinkerSettings) -> None:
    """Runs the stage until it is told to stop.

    Raises:
        Exception: the engine cannot start, or died.
    """
    server = StageServer(settings, STAGE, SERVICE_NAME)
    servicer = ThinkerServicer(settings, server.admission, server.hub)
    thinker_pb2_grpc.add_ThinkerServiceServicer_to_server(servicer, server.grpc)
    async with contextlib.AsyncExitStack() as stack:

        async def start() -> server_info_pb2.GetServerInfoResponse:
            engine = await ThinkerEngine.start(settings)
            stack.push_async_callback(engine.close)
            preprocessor = Preprocessor(settings, engine.checkpoint, engine.renderer, engine.max_context_tokens)
            stack.callback(preprocessor.close)
            await _warm_up(engine, preprocessor)
            servicer.bind(engine, preprocessor)
            watch = asyncio.create_task(_end_with(engine, server))
            stack.callback(watch.cancel)
            return _server_info(server, engine)

        await server.run(start)


async def _warm_up(engine: ThinkerEngine, preprocessor: Preprocessor) -> None:
    prompt = await preprocessor.prepare(Conversation([Message("user", ["Hello"])]))
    request = thinker_pb2.SamplingParameters(max_tokens=2, ignore_eos=True)
    params = sampling_params(request, engine.sampling_defaults, engine.checkpoint.vocab_size, None)
    async for _ in engine.generate("warm-up", prompt, params):
        pass


async def _end_with(engine: ThinkerEngine, server: StageServer) -> None:
    await engine.died()
    await asyncio.sleep(GRACE_S)
    server.fatal(Unavailable("the thinker's engine died"))


def _server_info(server: StageServer, engine: ThinkerEngine) -> server_info_pb2.GetServerInfoResponse:
    checkpoint = engine.checkpoint
    return server.describe(
        engine.dtype,
        engine.device,
        rows=[server_info_pb2.RowsInfo(name=name) for name in offered_rows(engine.kept_layers)],
        thinker=server_info_pb2.ThinkerInfo(
            max_context_tokens=engine.max_context_tokens,
            accept_hidden_layer=checkpoint.accept_hidden_layer,
            input_modalities=["image", "audio", "video"],
        ),
    )
