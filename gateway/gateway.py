"""What the endpoints share."""

from gateway.media.fetch import Fetcher
from gateway.openai.errors import ApiError
from gateway.openai.transcripts import Transcripts
from gateway.pipeline.config import PipelineConfig
from gateway.pipeline.stages import Stages
from gateway.settings import GatewaySettings
from services.common.admission import Admission


class Gateway:
    """The pipeline's stages and the gateway's own state. Use as `async with`: the stages are watched meanwhile."""

    def __init__(self, settings: GatewaySettings, pipeline: PipelineConfig) -> None:
        self.settings = settings
        self.pipeline = pipeline
        self.stages = Stages(pipeline, settings.health_interval_s, settings.health_timeout_s)
        self.fetcher = Fetcher(settings)
        self.transcripts = Transcripts(settings.audio_ttl_s)
        self.admission = Admission(settings.max_running_requests, max_queued=0)

    async def __aenter__(self) -> "Gateway":
        await self.stages.__aenter__()
        self.admission.open()
        return self

    async def __aexit__(self, *_) -> None:
        await self.fetcher.close()
        await self.stages.__aexit__()

    @property
    def model_name(self) -> str | None:
        """Name clients ask for; None while only the thinker knows it and was never reached."""
        thinker = self.stages.thinker
        return self.settings.model_name or self.pipeline.model or (thinker.info.model if thinker.info else None)

    def require_model(self, name: str) -> None:
        """Raises ApiError: 404 if this is not the model served, 503 if that is not known yet."""
        served = self.model_name
        if served is None:
            state = self.stages.thinker.state
            message = f"the thinker was not reached yet ({state}); retry later"
            raise ApiError(503, message, None, "stage_unavailable", "service_unavailable_error", 1)
        if name != served:
            message = f"model: {name!r} does not exist here; this server has {served!r}"
            raise ApiError(404, message, "model", "model_not_found")
