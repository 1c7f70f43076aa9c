"""What the endpoints share."""

import asyncio
import time
import uuid

from gateway.access.shared import SharedState
from gateway.answers.video_jobs import VideoJobs
from gateway.answers.voice_store import VoiceStore
from gateway.errors import ApiError, from_error, invalid
from gateway.listening.detector import Detectors
from gateway.listening.turn_model import TurnModel
from gateway.media.fetch import Fetcher
from gateway.pipeline.config import PipelineConfig, TalkerSampling
from gateway.pipeline.kinds import Output
from gateway.pipeline.pipeline import Pipeline
from gateway.pipeline.stage import Stage
from gateway.profiling.fan_out import Profiler
from gateway.settings import GatewaySettings
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
        settings: of the gateway.
        config: the pipeline.
        channels: to the stages.
        spans: of its requests; None: there are none yet.
        fetcher: gets the media of requests; default: one that goes by the settings.
        shared: with the gateway's other processes; None: there are none.

    Raises:
        ModelFileError: on entering: a model that the settings name, of speech or of turns, cannot be used.
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
        self._voices: VoiceStore | None = None
        self._detectors: Detectors | None = None
        self.turn_model: TurnModel | None = None

    async def __aenter__(self) -> "Gateway":
        if (file := self.settings.speech_detector) is not None:
            self._detectors = await asyncio.to_thread(Detectors, file)
        if (file := self.settings.turn_model) is not None:
            self.turn_model = await asyncio.to_thread(TurnModel, file)
        await self.pipeline.__aenter__()
        self.admission.open()
        return self

    async def __aexit__(self, *_) -> None:
        await self.fetcher.close()
        await self.pipeline.__aexit__()
        if self._detectors is not None:
            self._detectors.close()
        if self.turn_model is not None:
            self.turn_model.close()
        if self._voices is not None:
            await self._voices.close()

    @property
    def detectors(self) -> Detectors:
        """Those of speech, for realtime sessions; made when they are first asked for."""
        if self._detectors is None:
            self._detectors = Detectors(self.settings.speech_detector)
        return self._detectors

    @property
    def voices(self) -> VoiceStore:
        """The uploaded voices, for a talker that imitates them. Nothing is opened, or made, before they are asked for.

        Raises:
            StoreError: there is no place for them.
        """
        if self._voices is None:
            settings = self.settings
            self._voices = VoiceStore(settings.voices_dir, settings.max_voices, settings.max_voices_per_key)
        return self._voices

    def model_of(self, stage: Stage) -> str | None:
        """Name clients ask for the stage's model by; None while only the stage knows it and was never reached.

        The settings' name, or else the pipeline file's, is that of the main stage.
        """
        name = self.settings.model_name or self.pipeline.config.model
        if name is not None and stage is self.pipeline.main:
            return name
        return stage.info.model if stage.info else None

    @property
    def models(self) -> dict[str, Stage]:
        """The models that clients can ask for, the adapters of the thinker last; of two with one name the first."""
        models: dict[str, Stage] = {}
        for stage in self.pipeline.with_models:
            if (name := self.model_of(stage)) is not None:
                models.setdefault(name, stage)
        if (writer := self.pipeline.output("text")) is not None:
            for name in writer.loras:
                models.setdefault(name, writer)
        return models

    def parent_of(self, model: str) -> str | None:
        """The model that `model` is an adapter of; None if it is none."""
        stage = self.models.get(model)
        base = self.model_of(stage) if stage else None
        return base if base != model else None

    def lora_of(self, model: str | None, lora: str | None = None) -> str:
        """The adapter that a request asks for, as `model` or by `lora`; "" for none.

        Raises:
            ApiError: 404 if there is no adapter `lora`; 400 if `model` is another one.
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
            output: what is asked for.
            model: as the request names it.
            takes_loras: whether that may be an adapter of the thinker: the request is answered by one.

        Raises:
            ApiError: 400 if nothing here makes it, or another stage has that model; 404 and 503 as require_model.
        """
        stage = self.pipeline.output(output)
        if stage is None:
            made = ", ".join(self.pipeline.config.made)
            raise invalid("model", f"nothing here makes {output}; this server makes: {made}", "unsupported_model")
        if model is not None and not (takes_loras and self.parent_of(model)):
            self.require_model(model, stage)
        return stage

    def answerer(self, model: str) -> Stage:
        """The stage that answers as `model`, or as an adapter of it, in text or speech. Raises ApiError."""
        output: Output = "text" if self.pipeline.config.outputs.speech is None else "speech"
        return self.stage_for(output, model, takes_loras=True)

    def require_model(self, name: str, stage: Stage) -> None:
        """Raises ApiError: 404 if this is not the stage's model, 503 if that is not known yet."""
        served = self.model_of(stage)
        if served is None:
            raise not_reached(stage)
        if name == served:
            return
        self.model_stage(name)
        raise invalid("model", f"{name!r} does not do this; {served!r} does", "unsupported_model")

    @property
    def reads_text(self) -> bool:
        """Whether its talker, if it has one, speaks a text that it is sent; False while that was never reached."""
        talker = self.pipeline.info("talker")
        return talker is not None and talker.reads_text

    def speaker(self, voice: str | None, param: str) -> str:
        """The voice as the talker spells it; "" for its default. Raises ApiError: 400 for `param`, no such voice."""
        voices = self.pipeline.voices
        if voice is None or not voices:
            return voice or ""
        match = match_case(voice, voices)
        if match is None:
            raise invalid(param, f"no voice {voice!r}; use one of {', '.join(voices)}")
        return match

    def talker_sampling(self, asked: TalkerSampling, seed: int | None) -> talker_pb2.TalkerSampling:
        """The talker's sampling for a request's `asked`. `seed` counts where `asked` has none."""
        assert self.pipeline.config.talker is not None
        sampling = talker_pb2.TalkerSampling(**asked.over(self.pipeline.config.talker.sampling))
        if not sampling.HasField("seed") and seed is not None:
            sampling.seed = seed
        return sampling

    def not_known_yet(self, *kinds: str) -> ApiError:
        """The 503 for the first stage of an answer that is of `kinds` and was never reached; there is one."""
        return not_reached(next(stage for stage in self.pipeline.answer if stage.kind in kinds and stage.info is None))

    def model_stage(self, name: str) -> Stage:
        """The stage of the model `name`. Raises ApiError: 404 if there is none, 503 if no name is known yet."""
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
    """Transcripts by audio id, each for `ttl_s` seconds, in `shared`; the oldest go first when there are too many."""

    def __init__(self, ttl_s: float, shared: SharedState | None = None) -> None:
        self._ttl_s, self._shared = ttl_s, shared or SharedState()

    def new_id(self) -> tuple[str, int]:
        """A new audio id, and the Unix time, in seconds, at which it expires."""
        return f"audio_{uuid.uuid4().hex}", int(time.time() + self._ttl_s)

    def put(self, audio_id: str, expires_at: int, transcript: str) -> None:
        """Remembers `transcript` until `expires_at`."""
        with self._shared.change() as database:
            database.execute("INSERT OR REPLACE INTO transcripts VALUES (?, ?, ?)", (audio_id, expires_at, transcript))
            (last,) = database.execute("SELECT max(rowid) FROM transcripts").fetchone()
            too_old = (time.time(), last - _MAX_TRANSCRIPTS)
            database.execute("DELETE FROM transcripts WHERE expires_at <= ? OR rowid <= ?", too_old)

    def get(self, audio_id: str) -> str | None:
        """The transcript; None for an unknown or expired id."""
        statement = "SELECT transcript FROM transcripts WHERE audio_id = ? AND expires_at > ?"
        found = self._shared.first(statement, audio_id, time.time())
        return None if found is None else found[0]
