"""`quartet.v1.EncoderService`: messages in, engine calls, messages out."""

import asyncio
from collections.abc import AsyncIterator

import grpc

from quartet.v1 import encoder_pb2, encoder_pb2_grpc
from services.common.rpc.call import Admission, serve_call
from services.common.rpc.errors import InvalidInput
from services.common.rpc.messages import first_start
from services.common.stream.hub import StreamHub
from services.diffusion.conditioning import send_conditioning
from services.diffusion.images import decode_files, read_files
from services.diffusion.model_info import dit_info
from services.diffusion.request import OutputSpec, check, resolve
from services.encoder.config import EncoderSettings
from services.encoder.engine import EncoderEngine


class EncoderServicer(encoder_pb2_grpc.EncoderServiceServicer):
    """Serves requests by an engine, which `bind` sets once it is loaded."""

    def __init__(self, admission: Admission, hub: StreamHub, settings: EncoderSettings) -> None:
        self._admission, self._hub, self._settings = admission, hub, settings
        self._engine: EncoderEngine

    def bind(self, engine: EncoderEngine) -> None:
        """The engine, before `admission` opens."""
        self._engine = engine
        self._info = dit_info(engine.models, self._settings)

    async def Encode(
        self, request_iterator: AsyncIterator[encoder_pb2.EncodeRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[encoder_pb2.EncodeResponse]:
        start = await first_start(request_iterator, context)
        async with serve_call("encoder", start.request.request_id, context, self._admission) as call:
            if not start.output_stream_id:
                raise InvalidInput("output_stream_id", "is required")
            with self._hub.open(start.output_stream_id, []) as output:
                output.start(prompt_positions=0)
                outputs = await self._resolve(start, request_iterator)
                call.timings.mark_started()
                made = await self._engine.encode(outputs, asyncio.get_running_loop())
                call.timings.mark_output()
                tensors, size_bytes = await asyncio.to_thread(
                    send_conditioning, output, made, asyncio.get_running_loop()
                )
                call.set(tensors=tensors, size_bytes=size_bytes)
                output.finish(end_position=0)
            yield encoder_pb2.EncodeResponse(
                summary=encoder_pb2.EncodeSummary(
                    tensors=tensors, size_bytes=size_bytes, timings=call.timings.to_message()
                )
            )

    async def _resolve(
        self, start: encoder_pb2.EncodeStart, requests: AsyncIterator[encoder_pb2.EncodeRequest]
    ) -> list[OutputSpec]:
        request = start.request
        request.ClearField("loras")  # of the transformer
        task = check(request, self._info)
        if self._engine.draws_prior_tokens and not request.HasField("seed"):
            raise InvalidInput("seed", "is required: this model draws prior tokens by it")
        files = await read_files(request, requests, self._settings)

        def decode_and_resolve() -> list[OutputSpec]:
            pictures, mask = decode_files(files, self._settings)
            return resolve(request, task, pictures, mask, self._engine.models, self._info).outputs

        return await asyncio.to_thread(decode_and_resolve)
