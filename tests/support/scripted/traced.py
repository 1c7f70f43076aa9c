"""Scripted stages in the shell that real ones have: admission, spans, metrics, and streams from one to the next."""

from collections.abc import AsyncIterator
from functools import partial

import grpc
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from gateway.pipeline.kinds import KINDS
from quartet.v1 import (
    code2wav_pb2_grpc,
    server_info_pb2_grpc,
    stream_pb2,
    stream_pb2_grpc,
    talker_pb2,
    talker_pb2_grpc,
    thinker_pb2,
    thinker_pb2_grpc,
)
from services.common.rpc import channels
from services.common.rpc.call import Admission, Call, serve_call
from services.common.stream.hub import StreamHub, TensorStreamServicer
from services.common.stream.rows import Chunk, Rows
from services.thinker.delta_streams import DeltaStreams
from tests.support.scripted.code2wav import Code2Wav
from tests.support.scripted.stages import ScriptedStages, scripted_stages
from tests.support.scripted.talker import Talker
from tests.support.scripted.thinker import Thinker
from tests.support.stage.streaming import subscribe


class _Shell:
    """What all three have."""

    stage: str

    def __init__(self, script) -> None:
        self.script, self.hub = script, StreamHub()
        self.admission = Admission(2, 2, self.stage)
        self.admission.open()

    async def produce(self, stream_id: str, name: str) -> None:
        """A stream of three rows, made before anybody reads it."""
        with self.hub.open(stream_id, [name]) as output:
            output.start(prompt_positions=0)
            output.put([Rows(name, 0, torch.zeros(3, 4, dtype=torch.int32))])
            await output.subscription(60)
            output.finish(3)

    async def consume(self, source: stream_pb2.StreamSource, request_id: str) -> int:
        """Chunks of the stream before."""
        count = 0
        async with subscribe(source, request_id, []) as messages:
            async for message in messages:
                count += isinstance(message, Chunk)
        return count

    async def play(self, responses, call: Call) -> AsyncIterator:
        call.timings.mark_started()
        call.timings.mark_prefilled()
        async for response in responses:
            call.timings.mark_output()
            yield response


class TracedThinker(_Shell, Thinker):
    stage = "thinker"

    def __init__(self, script) -> None:
        super().__init__(script)
        self._deltas = DeltaStreams()

    async def Generate(self, request_iterator, context):
        start = (await anext(request_iterator)).start

        async def again():
            yield thinker_pb2.GenerateRequest(start=start)

        async with serve_call(self.stage, start.request_id, context, self.admission) as call:
            await self.produce(start.output_stream_id, "token_ids")
            async for response in self.play(Thinker.Generate(self, again(), context), call):
                yield response


class TracedTalker(_Shell, Talker):
    stage = "talker"

    async def Speak(self, request_iterator, context):
        start = (await anext(request_iterator)).start

        async def again():
            yield talker_pb2.SpeakRequest(start=start)

        async with serve_call(self.stage, start.request_id, context, self.admission) as call:
            assert await self.consume(start.source, start.request_id) == 1
            await self.produce(start.output_stream_id, "codes")
            async for response in self.play(Talker.Speak(self, again(), context), call):
                yield response


class TracedCode2Wav(_Shell, Code2Wav):
    stage = "code2wav"

    async def Decode(self, request, context):
        async with serve_call(self.stage, request.request_id, context, self.admission) as call:
            assert await self.consume(request.source, request.request_id) == 1
            async for response in self.play(Code2Wav.Decode(self, request, context), call):
                yield response


_SERVICERS = {
    "thinker": (TracedThinker, thinker_pb2_grpc.add_ThinkerServiceServicer_to_server),
    "talker": (TracedTalker, talker_pb2_grpc.add_TalkerServiceServicer_to_server),
    "code2wav": (TracedCode2Wav, code2wav_pb2_grpc.add_Code2WavServiceServicer_to_server),
}


class TracedStages(ScriptedStages):
    """The servers, with the streams that scripted stages have not."""

    async def start(self, stage: str) -> None:
        servicer_class, add = _SERVICERS[stage]
        server = self.servers[stage] = grpc.aio.server(options=channels.SERVER_OPTIONS)
        servicer = servicer_class(self.scripts[stage])
        add(servicer, server)
        stream_pb2_grpc.add_TensorStreamServiceServicer_to_server(TensorStreamServicer(servicer.hub, stage), server)
        server_info_pb2_grpc.add_ServerInfoServiceServicer_to_server(self.infos[stage], server)
        servicer_of_health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        await servicer_of_health.set(KINDS[stage].service, health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer_of_health, server)
        self.addresses[stage] = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()


traced_stages = partial(scripted_stages, of=TracedStages)
"""Running servers of the kinds it is given."""
