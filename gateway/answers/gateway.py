"""What the endpoints share."""

import asyncio
import time
import uuid
from contextlib import AsyncExitStack
from functools import cached_property
from typing import Any

from gateway.access.shared import SharedState
from gateway.answers.video_jobs import VideoJobs
from gateway.answers.voice_store import VoiceStore
from gateway.errors import ApiError, from_error, invalid
from gateway.listening.detector import Detectors
from gateway.listening.turn_model import TurnModel
from gateway.media.fetch import Fetcher
from gateway.pipeline.config import PipelineConfig
from gateway.pipeline.kinds import Output
from gateway.pipeline.pipeline import Pipeline
from gateway.pipeline.sampling import TalkerSampling
from gateway.pipeline.stage import Stage
from gateway.profiling.fan_out import Profiler
from gateway.settings import GatewaySettings
from gateway.store import store_errors
from quartet.v1 import talker_pb2
from services.common.rpc.call import Admission
from services.common.rpc.channels import Channels
from services.common.telemetry.spans import Spans
from services.common.text import match_case

_AUDIO_TTL_S = 3600.0  # how long a spoken answer's audio id can be referred to
_MAX_TRANSCRIPTS = 10_000


class Gateway:
    """The pipeline's stages and the gateway's own state. Use as `async with`: the stages are watched meanwhile.

    Args:
        spans: of its requests.
        fetcher: gets the media of requests.
        shared: state of all the gateway's processes; None: this is the only one.

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
    ) -> None:
        self.settings = settings
        self.pipeline = Pipeline(config, timeout_s=settings.health_timeout_s, channels=channels)
        self.fetcher = fetcher or Fetcher(settings)
        self.transcripts = Transcripts(_AUDIO_TTL_S, shared)
        self.admission = Admission(settings.max_running_requests, max_queued=0, stage="gateway")
        self.spans = Spans() if spans is None else spans
        self.profiling = Profiler(self.pipeline, self.spans, settings.request_timeout_s)
        self.realtime_sessions = 0
        self.videos: VideoJobs | None = None  # where a stage makes videos, and this process has the jobs
        self.administration = asyncio.Lock()
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
        self.admission.open()
        return self

    async def __aexit__(self, *_) -> None:
        await self._opened.aclose()

    @cached_property
    def detectors(self) -> Detectors:
        """Of speech; made at the first use."""
        detectors = Detectors(self.settings.speech_detector)
        self._opened.callback(detectors.close)
        return detectors

    @cached_property
    def voices(self) -> VoiceStore:
        """The uploaded voices; opened at the first use. Raises ApiError: there is no place for them."""
        with store_errors(VoiceStore.fault):
            voices = VoiceStore(self.settings.voices_dir, self.settings.max_voices, self.settings.max_voices_per_key)
        self._opened.push_async_callback(voices.close)
        return voices

    def model_of(self, stage: Stage) -> str | None:
        """The name that clients have for the stage's model; None: only the stage knows it, and was never reached.

        The name in the settings, or else in the pipeline file, is that of the main stage.
        """
        name = self.settings.model_name or self.pipeline.config.model
        if name is not None and stage is self.pipeline.main:
            return name
        return stage.info.model if stage.info else None

    @property
    def models(self) -> dict[str, Stage]:
        """The models that clients can ask for, the thinker's adapters last; of two with one name the first."""
        models: dict[str, Stage] = {}
        for stage in self.pipeline.with_models:
            if (name := self.model_of(stage)) is not None:
                models.setdefault(name, stage)
        if (writer := self.pipeline.output("text")) is not None:
            for name in writer.loras:
                models.setdefault(name, writer)
        return models

    def parent_of(self, model: str) -> str | None:
        """The model that `model` is an adapter of, if it is one."""
        stage = self.models.get(model)
        base = self.model_of(stage) if stage else None
        return base if base != model else None

    def lora_of(self, model: str | None, lora: str | None = None) -> str:
        """The adapter that a request asks for, as `model` or by `lora`; "" for none.

        Raises:
            ApiError: 404, there is no adapter `lora`; 400, `model` is another one.
        """
        named = model if model is not None and self.parent_of(model) else ""
        if lora is None:
            return named
        if self.parent_of(lora) is None:
            known = ", ".join(name for name in self.models if self.parent_of(name)) or "none"
            message = f"lora: there is no adapter {lora!r}; loaded are: {known}"
            raise ApiError(404, message, "lora", "model_not_found")
        if named not in ("", lora):
            raise invalid("lora", f"the model asked for is another adapter, {named!r}; leave one of them out")
        return lora

    def stage_for(self, output: Output, model: str | None, takes_loras: bool = False) -> Stage:
        """The stage that makes `output`, for a request that names `model`, or none.

        Args:
            takes_loras: whether `model` may be an adapter of the thinker.

        Raises:
            ApiError: 400, nothing here makes it, or another stage has that model; 404 and 503 as require_model.
        """
        stage = self.pipeline.output(output)
        if stage is None:
            made = ", ".join(self.pipeline.config.made)
            raise invalid("model", f"nothing here makes {output}; this server makes: {made}", "unsupported_model")
        if model is not None and not (takes_loras and self.parent_of(model)):
            self.require_model(model, stage)
        return stage

    def answerer(self, model: str) -> Stage:
        """The stage that answers as `model`, or as an adapter of it. Raises ApiError."""
        output: Output = "text" if self.pipeline.config.outputs.speech is None else "speech"
        return self.stage_for(output, model, takes_loras=True)

    def require_model(self, name: str, stage: Stage) -> None:
        """Raises ApiError: 404, not the stage's model; 503, that is not known yet."""
        served = self.model_of(stage)
        if served is None:
            raise not_reached(stage)
        if name != served:
            self.model_stage(name)
            raise invalid("model", f"{name!r} does not do this; {served!r} does", "unsupported_model")

    def speaker(self, voice: str | None, param: str) -> str:
        """The voice as the talker spells it; "": its default. Raises ApiError: 400 for `param`."""
        voices = self.pipeline.voices
        if voice is None or not voices:
            return voice or ""
        match = match_case(voice, voices)
        if match is None:
            raise invalid(param, f"no voice {voice!r}; use one of {', '.join(voices)}")
        return match

    def talker_sampling(self, asked: TalkerSampling, seed: int | None) -> talker_pb2.TalkerSampling:
        """The sampling `asked` for, over the pipeline's. `seed` counts where `asked` has none."""
        assert self.pipeline.config.talker is not None
        sampling = talker_pb2.TalkerSampling(**asked.over(self.pipeline.config.talker.sampling))
        if not sampling.HasField("seed") and seed is not None:
            sampling.seed = seed
        return sampling

    def known(self, kind: str) -> Any:
        """Info of the answer's stage of `kind`, e.g. TalkerInfo. Raises ApiError: 503, it was never reached."""
        if (info := self.pipeline.info(kind)) is None:
            raise not_reached(next(stage for stage in self.pipeline.answer if stage.kind == kind))
        return info

    def model_stage(self, name: str) -> Stage:
        """Raises ApiError: 404, there is no such model; 503, no name is known yet."""
        models = self.models
        if not models:
            raise not_reached(self.pipeline.main)
        if name not in models:
            message = f"model: {name!r} does not exist here; this server has {' and '.join(map(repr, models))}"
            raise ApiError(404, message, "model", "model_not_found")
        return models[name]


def not_reached(stage: Stage) -> ApiError:
    """The 503 for a stage that must be known first."""
    return from_error(stage.kind, stage.unavailable())


class Transcripts:
    """Transcripts by audio id, each kept for `ttl_s` seconds; the oldest go first when there are too many."""

    def __init__(self, ttl_s: float, shared: SharedState | None = None) -> None:
        self._ttl_s, self._shared = ttl_s, shared or SharedState()

    def new_id(self) -> tuple[str, int]:
        """A new audio id, and the Unix time at which it expires."""
        return f"audio_{uuid.uuid4().hex}", int(time.time() + self._ttl_s)

    def put(self, audio_id: str, expires_at: int, transcript: str) -> None:
        with self._shared.change() as database:
            database.execute("INSERT OR REPLACE INTO transcripts VALUES (?, ?, ?)", (audio_id, expires_at, transcript))
            (last,) = database.execute("SELECT max(rowid) FROM transcripts").fetchone()
            too_old = (time.time(), last - _MAX_TRANSCRIPTS)
            database.execute("DELETE FROM transcripts WHERE expires_at <= ? OR rowid <= ?", too_old)

    def get(self, audio_id: str) -> str | None:
        statement = "SELECT transcript FROM transcripts WHERE audio_id = ? AND expires_at > ?"
        found = self._shared.first(statement, audio_id, time.time())
        return None if found is None else found[0]
