"""What the endpoints share."""

import asyncio
import secrets
import socket
from contextlib import AsyncExitStack
from functools import cached_property
from pathlib import Path

from gateway.access.sessions import HeldBySessions
from gateway.access.shared import SharedState
from gateway.answers.catalog import Catalog
from gateway.answers.files.files import Files, has_files
from gateway.answers.room import ROOM_VALUES, Room
from gateway.answers.transcript_store import TranscriptStore
from gateway.answers.transcripts import Transcripts
from gateway.answers.video_jobs import VideoJobs
from gateway.answers.voice_store import VoiceStore, voice_store
from gateway.listening.detector import Detectors
from gateway.listening.turn_model import TurnModel
from gateway.media.fetch import Fetcher
from gateway.pipeline.config import PipelineConfig
from gateway.pipeline.pipeline import Pipeline
from gateway.pipeline.stage import Stage
from gateway.profiling.fan_out import Profiler
from gateway.settings import GatewaySettings
from gateway.store.database import Database
from gateway.store.errors import store_errors
from gateway.workers.siblings import Siblings
from services.common.rpc.call import Admission
from services.common.rpc.channels import Channels
from services.common.telemetry.spans import Spans

_CHECK = "check_stage"


class Gateway:
    """The pipeline's stages and the gateway's own state. Use as `async with`: the stages are watched meanwhile.

    Args:
        spans: of its requests.
        fetcher: gets the media of requests.
        shared: state of all the gateway's processes; None: this is the only one.
        siblings: the others of them.
        database: keeps what many gateways share; None: each kind of thing has a SQLite file in its directory.

    Attributes:
        name: of this process among all that share the database.
        node: of this process, in ids of what it holds; "": no other process asks for it.

    Raises:
        ModelFileError: on entering: a speech or turn model of the settings cannot be used.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        config: PipelineConfig,
        channels: Channels,
        spans: Spans | None = None,
        fetcher: Fetcher | None = None,
        shared: SharedState | None = None,
        siblings: Siblings | None = None,
        database: Database | None = None,
    ) -> None:
        self.settings, self.database = settings, database
        self.name = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self.node = ""
        self.pipeline = Pipeline(config, timeout_s=settings.health_timeout_s, channels=channels)
        self.catalog = Catalog(self.pipeline, settings.model_name, settings.model_alias)
        self.fetcher = fetcher or Fetcher(settings)
        self.transcripts = Transcripts(shared=shared, store=database and TranscriptStore(database))
        self.admission = Admission(settings.max_running_requests, max_queued=0, stage="gateway")
        self.spans = Spans() if spans is None else spans
        self.siblings = siblings or Siblings()
        self.siblings.on(_CHECK, self._check)
        self.profiling = Profiler(self.pipeline, self.spans, settings.request_timeout_s, self.siblings)
        self.realtime_sessions = 0
        self.held_by_sessions = HeldBySessions(2 * settings.max_realtime_bytes)
        self.embedding_room = Room(ROOM_VALUES)
        self.videos: VideoJobs | None = None  # where a stage makes videos
        self.turn_model: TurnModel | None = None
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> "Gateway":
        if self.settings.speech_detector is not None:
            await asyncio.to_thread(lambda: self.detectors)
        if (file := self.settings.turn_model) is not None:
            self.turn_model = await asyncio.to_thread(TurnModel, file)
            self._opened.callback(self.turn_model.close)
        await self._opened.enter_async_context(self.pipeline)
        self._opened.push_async_callback(self.fetcher.close)
        self._opened.push_async_callback(self.transcripts.close)
        self.fetcher.decoding.start_later()
        if has_files(self.settings):  # those that expire are removed even if nobody asks for any
            _ = self.files
        self.admission.open()
        return self

    async def __aexit__(self, *_) -> None:
        await self._opened.aclose()

    async def check(self, stage: Stage) -> None:
        """Has all workers know what the replicas of `stage` are now, such as their adapters."""
        await asyncio.gather(self._check(stage.name), self.siblings.call_others(_CHECK, stage.name))

    async def _check(self, stage: str) -> None:
        await self.pipeline.by_name[stage].check(self.settings.health_timeout_s)

    def place(self, directory: Path | None) -> Database | Path | None:
        """Where a store is: in the database if there is one, else in its `directory`."""
        return self.database or directory

    @cached_property
    def detectors(self) -> Detectors:
        """Of speech; made at the first use."""
        detectors = Detectors(self.settings.speech_detector)
        self._opened.callback(detectors.close)
        return detectors

    @cached_property
    def files(self) -> Files:
        """The uploaded files; opened at the first use. Raises ApiError: there is no place for them."""
        files = Files(self.place(self.settings.files_dir), self.settings)
        files.begin()
        self._opened.push_async_callback(files.close)
        return files

    @cached_property
    def voices(self) -> VoiceStore:
        """The uploaded voices; opened at the first use. Raises ApiError: there is no place for them."""
        with store_errors(VoiceStore.fault):
            voices = voice_store(self.settings, self.database)
        voices.begin()
        self._opened.push_async_callback(voices.close)
        return voices
