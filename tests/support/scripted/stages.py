"""Servers of scripted stages."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from gateway.pipeline.kinds import KINDS
from quartet.v1 import (
    aligner_pb2_grpc,
    code2wav_pb2_grpc,
    dit_pb2_grpc,
    embedder_pb2_grpc,
    encoder_pb2_grpc,
    server_info_pb2_grpc,
    talker_pb2_grpc,
    thinker_pb2_grpc,
)
from services.common.rpc import channels
from tests.support.scripted.aligner import Aligner
from tests.support.scripted.code2wav import Code2Wav
from tests.support.scripted.dit import Dit
from tests.support.scripted.embedder import Embedder
from tests.support.scripted.encoder import Encoder
from tests.support.scripted.script import HOST, Script
from tests.support.scripted.server_info import ServerInfo
from tests.support.scripted.talker import Talker
from tests.support.scripted.thinker import Thinker

EARS = "ears"  # a thinker that only writes down speech
RERANKER = "reranker"  # an embedder that scores pairs
_KINDS = {EARS: "thinker", RERANKER: "embedder"}


class ScriptedStages:
    """A server for each of `kinds`.

    Attributes:
        scripts: what each does, by stage; to be changed by tests.
        addresses: "host:port" by stage.
        servers: the servers by stage; stopping one without grace is what a killed process looks like.
        infos: what they say of themselves.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self.scripts = {stage: Script() for stage in kinds}
        self.addresses: dict[str, str] = {}
        self.servers: dict[str, grpc.aio.Server] = {}
        self.infos = {stage: ServerInfo(stage, script) for stage, script in self.scripts.items()}

    async def start(self, stage: str) -> None:
        """Starts a server, at the address it had before if any."""
        server = self.servers[stage] = grpc.aio.server(options=channels.SERVER_OPTIONS)
        script = self.scripts[stage]
        if stage in ("thinker", EARS):
            thinker_pb2_grpc.add_ThinkerServiceServicer_to_server(Thinker(script, self.infos[stage]), server)
        elif stage == "talker":
            talker_pb2_grpc.add_TalkerServiceServicer_to_server(Talker(script), server)
        elif stage == "dit":
            dit_pb2_grpc.add_DitServiceServicer_to_server(Dit(script), server)
        elif stage in ("embedder", RERANKER):
            embedder_pb2_grpc.add_EmbedderServiceServicer_to_server(Embedder(script), server)
        elif stage == "aligner":
            aligner_pb2_grpc.add_AlignerServiceServicer_to_server(Aligner(script), server)
        elif stage == "encoder":
            encoder_pb2_grpc.add_EncoderServiceServicer_to_server(Encoder(script), server)
        else:
            code2wav_pb2_grpc.add_Code2WavServiceServicer_to_server(Code2Wav(script), server)
        server_info_pb2_grpc.add_ServerInfoServiceServicer_to_server(self.infos[stage], server)
        self.infos[stage].serving = True
        reported = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]  for the supervisor
        await reported.set(KINDS[_KINDS.get(stage, stage)].service, health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(reported, server)
        self.add_more(stage, server)
        address = self.addresses.get(stage, f"{HOST}:0")
        port = server.add_insecure_port(address)
        self.addresses[stage] = f"{address.rpartition(':')[0]}:{port}"
        await server.start()

    def add_more(self, stage: str, server: grpc.aio.Server) -> None:
        """Adds services that few tests need."""

    def set_serving(self, stage: str, serving: bool) -> None:
        """Has a stage report from now on that it serves, or does not."""
        self.infos[stage].serving = serving


@asynccontextmanager
async def scripted_stages(*kinds: str, of: type[ScriptedStages] = ScriptedStages) -> AsyncIterator[ScriptedStages]:
    """Running servers, as `of` makes them; by default those that speak: thinker, talker and code2wav."""
    kinds = kinds or ("thinker", "talker", "code2wav")
    stages = of(kinds)
    for stage in kinds:
        await stages.start(stage)
    try:
        yield stages
    finally:
        await asyncio.gather(*(server.stop(grace=None) for server in stages.servers.values()))
