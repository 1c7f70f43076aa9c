"""What scripted stages say of themselves."""

import asyncio

from quartet.v1 import server_info_pb2, server_info_pb2_grpc
from tests.support.scripted.aligner import ALIGNS
from tests.support.scripted.code2wav import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from tests.support.scripted.dit import PICTURES
from tests.support.scripted.embedder import EMBEDDINGS, SCORES
from tests.support.scripted.script import Script
from tests.support.scripted.talker import CODES, VOICES


class ServerInfo(server_info_pb2_grpc.ServerInfoServiceServicer):
    """What one says, and of its health.

    Attributes:
        answers_checks: to be cleared by tests, so that health checks wait.
        waiting: checks that wait.
    """

    def __init__(self, stage: str, script: Script) -> None:
        self.script = script
        self.answers_checks = asyncio.Event()
        self.answers_checks.set()
        self.waiting = 0
        self.revision, self.serving = 0, True
        self.info = server_info_pb2.GetServerInfoResponse(stage=stage, model="scripted")
        self.info.thinker.input_modalities.extend(["audio", "image"])
        self.info.thinker.calls_tools = True
        self.info.thinker.kv_block_tokens, self.info.thinker.kv_blocks = 16, 100
        self.info.thinker.default_temperature, self.info.thinker.default_top_p = 0.75, 0.875
        if stage == "dit":
            self.info.model = "scripted-dit"
            self.info.dit.CopyFrom(PICTURES)
        elif stage in ("embedder", "reranker"):
            self.info.stage, self.info.model = "embedder", f"scripted-{stage}"
            self.info.embedder.CopyFrom(EMBEDDINGS if stage == "embedder" else SCORES)
        elif stage == "aligner":
            self.info.model = "scripted-aligner"
            self.info.aligner.CopyFrom(ALIGNS)
        elif stage == "encoder":
            self.info.encoder.pipeline = PICTURES.pipeline
        elif stage == "talker":
            self.info.talker.speakers.extend(VOICES)
            self.info.talker.max_context_positions, self.info.talker.reads_text = 4096, True
            self.info.talker.takes_instructions, self.info.talker.num_code_groups = True, len(CODES[0])
        elif stage == "ears":
            self.info.stage, self.info.model = "thinker", "scripted-ears"
            self.info.thinker.input_modalities[:] = ["audio"]
            self.info.thinker.transcribes, self.info.thinker.only_transcribes = True, True
            self.info.thinker.max_sound_s = 30.0
        elif stage == "code2wav":
            self.info.code2wav.sample_rate_hz = SAMPLE_RATE_HZ
            self.info.code2wav.samples_per_frame = SAMPLES_PER_FRAME

    async def GetServerInfo(self, request, context):
        return self.info

    async def GetLoad(self, request, context):
        self.waiting += 1
        try:
            await self.answers_checks.wait()
        finally:
            self.waiting -= 1
        running, queued = self.script.running, self.script.queued
        return server_info_pb2.GetLoadResponse(
            running=running,
            queued=queued,
            info_revision=self.revision,
            kv_cache_usage=running / 4,
            serving=self.serving,
        )
