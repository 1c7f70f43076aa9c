"""The ASGI application."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit

from fastapi import APIRouter, FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from gateway.access import signing
from gateway.access.api_keys import ApiKeys
from gateway.access.client_secrets import ClientSecrets
from gateway.access.shared import SharedState
from gateway.access.usage import Usage
from gateway.answers.batches.runner import BatchRunner
from gateway.answers.batches.store import BatchStore
from gateway.answers.gateway import Gateway
from gateway.answers.video_jobs import VideoJobs
from gateway.answers.video_store import VideoStore, video_store
from gateway.dialects.anthropic import endpoint as messages
from gateway.dialects.anthropic.refusals import refused
from gateway.dialects.live import calls as live_calls
from gateway.dialects.live import connection as live
from gateway.dialects.live.sessions import LiveSessions
from gateway.dialects.openai import (
    audio,
    batch,
    batches,
    chat,
    completions,
    embeddings,
    files,
    images,
    invocations,
    models,
    render,
    rerank,
    speech,
    speech_stream,
    transcriptions,
    videos,
    voices,
)
from gateway.dialects.openai.batch_calls import BatchCalls
from gateway.dialects.operators import profiles as profiling
from gateway.dialects.operators import router_gauges
from gateway.dialects.realtime import calls, secrets
from gateway.dialects.realtime import connection as realtime
from gateway.dialects.responses import conversations
from gateway.dialects.responses import endpoint as responses
from gateway.dialects.responses import socket as response_socket
from gateway.dialects.responses.responses import Responses
from gateway.dialects.vllm import adapters, generate, server, tokens
from gateway.dialects.vllm.aborts import Aborts
from gateway.errors import ApiError
from gateway.http.bodies import Bodies
from gateway.http.csrf import OwnPagesOnly
from gateway.http.hosts import KnownHosts
from gateway.http.json_writer import Json, error_response
from gateway.http.middleware import BodyLimit, HeadAsGet, RequestContext, RequireKey
from gateway.http.neighbours.finder import HolderFinder
from gateway.http.neighbours.neighbours import NeighbourGateways
from gateway.http.neighbours.node import Node
from gateway.http.uploads import FORM_BYTES
from gateway.http.workers.router import WorkerRouter
from gateway.page import api as api_page
from gateway.page import files as page
from gateway.pipeline.config import PipelineConfig
from gateway.pipeline.pipeline import Pipeline
from gateway.settings import GatewaySettings
from gateway.store.blobs import WRITING_BYTES
from gateway.store.postgres import database_of
from gateway.workers.siblings import Siblings
from gateway.workers.worker import Worker
from services.common.engine.process import freeze_heap
from services.common.rpc.channels import Channels
from services.common.rpc.tls import Credentials
from services.common.telemetry.metrics_page import MetricsPage
from services.common.telemetry.spans import Spans

router = APIRouter(tags=["operations"])


@router.get("/health")
async def health() -> dict[str, str]:
    """The process lives, whatever its stages do."""
    return {"status": "ok"}


@router.get("/ready", responses={503: {"description": "a stage does not serve"}})
async def ready(http: Request, partly: bool = False) -> Json:
    """200 if every stage serves, else 503; the body has the available outputs and the states of stages and replicas.

    `partly=true`: 200 also if every stage was checked and some output is available."""
    pipeline: Pipeline = http.app.state.gateway.pipeline
    stages, served = pipeline.by_name.items(), pipeline.served
    is_partly_ready = bool(served) and pipeline.is_settled
    is_ready = pipeline.ready or (partly and is_partly_ready)
    body = {
        "status": "ready" if pipeline.ready else "partly ready" if is_partly_ready else "not ready",
        "outputs": served,
        "stages": {name: stage.state for name, stage in stages},
        "replicas": {name: stage.describe_replicas() for name, stage in stages},
    }
    return Json(body, 200 if is_ready else 503)


@router.get("/metrics")
async def metrics(http: Request) -> Response:
    """Prometheus metrics."""
    return Response(http.app.state.metrics.read(), media_type=CONTENT_TYPE_LATEST)


_ENDPOINTS = (
    chat,
    batch,
    batches,
    invocations,
    adapters,
    files,
    images,
    models,
    audio,
    completions,
    embeddings,
    rerank,
    render,
    generate,
    tokens,
    server,
    speech,
    speech_stream,
    transcriptions,
    videos,
    voices,
    secrets,
    realtime,
    calls,
    live,
    live_calls,
    responses,
    response_socket,
    conversations,
    messages,
    profiling,
)

METRICS_KEPT_S = 1.0  # a page takes milliseconds of the event loop, and no key
_OWN_HEADERS = ("ignored", "sample-rate-hz", "seed", "voice")
_EXPOSED = ("Location", "Retry-After", "request-id", "x-request-id", *(f"x-quartet-{name}" for name in _OWN_HEADERS))


def create_app(
    settings: GatewaySettings,
    pipeline: PipelineConfig,
    credentials: Credentials | None = None,
    worker: Worker | None = None,
) -> FastAPI:
    """The gateway of `pipeline`, with `credentials` for the stages.

    Raises:
        YamlError: of the file of API keys.
        SigningKeyError: of that file.
        StoreError: of the database's URL.
    """
    spans = Spans()
    shared = SharedState() if worker is None else SharedState(worker.shared_file, worker.number)
    counts = shared if worker is None else SharedState(worker.counts_file, worker.number)
    siblings = Siblings(worker)
    keys = None if settings.api_keys_file is None else ApiKeys(settings.api_keys_file, counts)
    database = database_of(settings.database_url)
    is_first = worker is None or worker.is_first
    node = Node.of(shared.gateway, 0 if worker is None else worker.number)
    neighbours = database and NeighbourGateways(database, node.gateway, settings.own_url if is_first else None)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if keys is not None:
                stack.callback(asyncio.create_task(keys.watch()).cancel)
            if database is not None:
                stack.push_async_callback(database.shutdown)
                if keys is not None and is_first:
                    await stack.enter_async_context(Usage(database, counts, keys))
            if neighbours is not None:
                await stack.enter_async_context(neighbours)
            stack.push_async_callback(siblings.close)
            state = {"shared": shared, "siblings": siblings, "database": database}
            gateway = Gateway(settings, pipeline, Channels(credentials), spans, **state)
            if worker is not None or (database is not None and settings.own_url is not None):
                gateway.node = str(node)
            videos: VideoStore | None = None
            if pipeline.outputs.video is not None:
                videos = video_store(settings, database)
                stack.push_async_callback(videos.close)
                await videos.open()  # before the stages are looked at: who waits for them asks at once
            app.state.gateway = await stack.enter_async_context(gateway)
            app.state.responses = await stack.enter_async_context(Responses(app.state.gateway))
            if videos is not None:
                gateway.videos = await stack.enter_async_context(VideoJobs(videos, settings, counts))
            app.state.batches = None
            if (place := gateway.place(settings.files_dir)) is not None:
                kept = BatchStore(place, gateway.name, settings.file_ttl_s)
                ask = BatchCalls(app, None if keys is None else keys.named)
                app.state.batches = await stack.enter_async_context(BatchRunner(gateway, kept, ask))
            if worker is not None:  # the first that listens gets connections, which its siblings could have served
                await app.state.gateway.pipeline.settle(2 * settings.health_timeout_s)
            freeze_heap()
            yield

    title, summary = "Quartet", "OpenAI-compatible API of an omni-modal model"
    app = FastAPI(title=title, summary=summary, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.metrics = MetricsPage(
        lambda: generate_latest() + router_gauges.exposition(app.state.gateway), METRICS_KEPT_S
    )
    app.state.live_sessions = LiveSessions()
    app.state.aborts = Aborts(counts, siblings)
    app.state.client_secrets = ClientSecrets(shared, signing.load(settings.signing_key_file, shared))
    app.state.bodies = Bodies(settings.max_body_bytes)
    has_calls = settings.webrtc is not None
    app.add_middleware(HolderFinder, own=node, neighbours=neighbours, worker=worker, has_calls=has_calls)
    uploads = {f"POST {files.PATH}": settings.max_file_bytes + FORM_BYTES}
    limits = {"max_bytes": settings.max_body_bytes, "uploads": uploads, "upload_bytes": WRITING_BYTES}
    app.add_middleware(BodyLimit, bodies=app.state.bodies, **limits)
    if keys is not None:
        app.add_middleware(RequireKey, keys=keys, secrets=app.state.client_secrets)
    else:
        app.add_middleware(OwnPagesOnly, allowed=settings.allowed_origins)
    own_host = settings.own_url and urlsplit(settings.own_url).hostname
    hosts = [settings.host, *filter(None, (settings.published_host, own_host)), *settings.allowed_hosts]
    app.add_middleware(KnownHosts, names=hosts, everywhere=keys is None or bool(settings.allowed_hosts))
    # Refusals have an id and a log line, too.
    app.add_middleware(RequestContext, spans=spans, refusals={messages.PATH: refused})
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=_EXPOSED,
        )
    if worker is not None:
        app.add_middleware(WorkerRouter, siblings=siblings)
    app.add_middleware(HeadAsGet)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.include_router(router)
    app.include_router(api_page.router)
    for module in _ENDPOINTS:
        app.include_router(module.router)
    if settings.page:
        app.include_router(page.router)
    return app


async def _api_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    http.state.log.update(error.log)
    return error_response(error, http.scope["state"])


async def _http_exception(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = "not_found" if error.status_code == 404 else None
    message = f"{http.method} {http.url.path}: {error.detail}"
    response = error_response(ApiError(error.status_code, message, None, code), http.scope["state"])
    response.headers.update(error.headers or {})
    return response
