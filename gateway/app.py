"""The ASGI application: endpoints, middleware, error bodies."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from gateway import operations
from gateway.gateway import Gateway
from gateway.middleware import BodyLimit, RequestContext
from gateway.openai import chat, models
from gateway.openai.connection import ClientGone
from gateway.openai.errors import ApiError
from gateway.pipeline.config import PipelineConfig
from gateway.settings import GatewaySettings
from services.common.collector import freeze_heap


def create_app(settings: GatewaySettings, pipeline: PipelineConfig) -> FastAPI:
    """The gateway of `pipeline`. Its stages are watched between the app's startup and shutdown."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with Gateway(settings, pipeline) as app.state.gateway:
            freeze_heap()
            yield

    app = FastAPI(title="Quartet", summary="OpenAI-compatible API of an omni-modal model", lifespan=lifespan)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(RequestContext)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(ClientDisconnect, _client_disconnect)
    for module in (chat, models, operations):
        app.include_router(module.router)
    return app


async def _api_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    http.state.log.setdefault("code", error.code)
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
