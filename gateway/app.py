"""The ASGI application: endpoints, middleware, error bodies."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from gateway import operations
from gateway.access.keys import ApiKeys, RequireKey
from gateway.gateway import Gateway
from gateway.middleware import BodyLimit, RequestContext
from gateway.openai import chat, images, models, sound, videos
from gateway.openai.connection import ClientGone
from gateway.openai.errors import ApiError
from gateway.pipeline.config import PipelineConfig
from gateway.settings import GatewaySettings
from gateway.videos.jobs import Limits, VideoJobs
from gateway.videos.store import VideoStore
from services.common.engine.process import freeze_heap
from services.common.rpc.channels import Channels
from services.common.rpc.tls import Credentials


def create_app(settings: GatewaySettings, pipeline: PipelineConfig, credentials: Credentials | None = None) -> FastAPI:
    """The gateway of `pipeline`. Its stages are watched between the app's startup and shutdown.

    Args:
        settings: of the gateway.
        pipeline: its stages and outputs.
        credentials: who the gateway is to the stages; None: connections in the clear.

    Raises:
        YamlError: the file of API keys cannot be used.
    """
    keys = None if settings.api_keys_file is None else ApiKeys(settings.api_keys_file)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with (
            keys or nullcontext(),
            Gateway(settings, pipeline, Channels(credentials)) as app.state.gateway,
            _videos(settings, pipeline) as app.state.videos,
        ):
            freeze_heap()
            yield

    app = FastAPI(title="Quartet", summary="OpenAI-compatible API of an omni-modal model", lifespan=lifespan)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    if keys is not None:
        app.add_middleware(RequireKey, keys=keys)
    app.add_middleware(RequestContext)  # the outermost: refusals have an id and a log line, too
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(ClientDisconnect, _client_disconnect)
    for module in (chat, images, models, operations, sound, videos):
        app.include_router(module.router)
    return app


@asynccontextmanager
async def _videos(settings: GatewaySettings, pipeline: PipelineConfig) -> AsyncIterator[VideoJobs | None]:
    """The video jobs, if the pipeline makes videos."""
    if pipeline.outputs.video is None:
        yield None
        return
    limits = Limits(
        settings.max_running_videos, settings.max_queued_videos, settings.video_timeout_s, settings.drain_timeout_s
    )
    async with (
        VideoStore(settings.jobs_dir, settings.video_ttl_s) as store,
        VideoJobs(store, limits, videos.explain) as jobs,
    ):
        yield jobs


async def _api_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    http.state.log.update(error.log)
    return error.response()


async def _http_exception(http: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such path, no such method."""
    assert isinstance(error, HTTPException)
    code = "not_found" if error.status_code == 404 else None
    message = f"{http.method} {http.url.path}: {error.detail}"
    response = ApiError(error.status_code, message, None, code).response()
    response.headers.update(error.headers or {})
    return response


async def _client_disconnect(http: Request, error: Exception) -> Response:
    raise ClientGone from error
