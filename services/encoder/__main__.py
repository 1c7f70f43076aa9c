"""The encoder's process, `python -m services.encoder --model DIR_OR_ID --port 50055`."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import structlog

from quartet.v1 import dit_pb2, encoder_pb2, encoder_pb2_grpc, server_info_pb2
from services.common.errors import InvalidInput, require
from services.common.media.decoders import Decoders
from services.common.rpc.call import Admission, serve_call
from services.common.rpc.requests import first_start
from services.common.stage import Stage, main
from services.common.stream.hub import StreamHub
from services.diffusion.checks import check
from services.diffusion.conditioning_stream import send_conditioning
from services.diffusion.images import decode_apart, read_files
from services.diffusion.model_info import warm_up_output
from services.diffusion.pipelines import silence_libraries
from services.diffusion.request import OutputSpec, resolve
from services.encoder.config import EncoderSettings
from services.encoder.engine import EncoderEngine

SERVICE = "quartet.v1.EncoderService"
Requests = AsyncIterator[encoder_pb2.EncodeRequest]
Response = encoder_pb2.EncodeResponse

log = structlog.get_logger()


class EncoderServicer(encoder_pb2_grpc.EncoderServiceServicer):
    """Serves requests by `engine`, which is set once it is loaded, before `admission` opens."""

    def __init__(self, admission: Admission, hub: StreamHub, settings: EncoderSettings) -> None:
        self._admission, self._hub, self._settings = admission, hub, settings
        self.decoders = Decoders(settings.decoding_memory_bytes, settings.max_decoding_s)
        self.engine: EncoderEngine

    async def Encode(self, request_iterator: Requests, context: grpc.aio.ServicerContext) -> AsyncIterator[Response]:
        start = await first_start(request_iterator, context)
        async with serve_call("encoder", start.request.request_id, context, self._admission) as call:
            require(start.output_stream_id, "output_stream_id", "is required")
            with self._hub.open(start.output_stream_id, []) as output:
                output.start(prompt_positions=0)
                outputs = await self._resolve(start.request, request_iterator)
                call.timings.mark_started()
                made = await self.engine.encode(outputs)
                call.timings.mark_output()
                loop = asyncio.get_running_loop()
                tensors, size_bytes = await asyncio.to_thread(send_conditioning, output, made, loop)
                call.set(tensors=tensors, size_bytes=size_bytes)
                output.finish(end_position=0)
            timings = call.timings.to_message()
            yield Response(summary=encoder_pb2.EncodeSummary(tensors=tensors, size_bytes=size_bytes, timings=timings))

    async def _resolve(self, request: dit_pb2.DitStart, requests: Requests) -> list[OutputSpec]:
        engine = self.engine
        request.ClearField("loras")  # of the transformer
        check(request, engine.info)
        if engine.draws_prior_tokens and not request.HasField("seed"):
            raise InvalidInput("seed", "is required: this model draws prior tokens by it")
        files = await read_files(request, requests, self._settings)
        pictures = await decode_apart(files, request, engine.info, self._settings, self.decoders)
        return await asyncio.to_thread(resolve, request, pictures, engine.models, engine.info)


async def serve(stage: Stage, settings: EncoderSettings) -> None:
    """Runs the stage until it is told to stop."""
    servicer = EncoderServicer(stage.admission, stage.hub, settings)
    encoder_pb2_grpc.add_EncoderServiceServicer_to_server(servicer, stage.grpc)
    stage.resources.callback(servicer.decoders.close)

    async def start() -> server_info_pb2.GetServerInfoResponse:
        engine = await stage.load(asyncio.to_thread(EncoderEngine, settings))
        if not engine.models.family.needs_image:  # a picture may be read at a million pixels, however small it is
            await engine.encode([warm_up_output(engine.models, engine.info)])
        servicer.engine = engine
        engine.models.keep_encodings("encoder", settings.encoding_cache_mib)
        pipeline, names = engine.info.pipeline, engine.names
        log.info("loaded", pipeline=pipeline, models=names)
        info = server_info_pb2.EncoderInfo(pipeline=pipeline, models=names, needs_seed=engine.draws_prior_tokens)
        return stage.describe(str(engine.dtype), str(engine.models.device), encoder=info)

    await stage.serve(start)


if __name__ == "__main__":
    loaded = EncoderSettings.load()
    silence_libraries()
    main(loaded, "encoder", SERVICE, serve)
