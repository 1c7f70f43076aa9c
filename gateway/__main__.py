"""Starts the gateway: `python -m gateway --pipeline FILE [--stage NAME=HOST:PORT ...]`."""

import contextlib
import logging
import signal
import sys
from functools import partial

import structlog
import uvicorn
from starlette.types import ASGIApp

from gateway.access.signing import SigningKeyError
from gateway.answers.files.files import has_files
from gateway.answers.files.store import FileStore
from gateway.answers.tools.registry import TOOLS
from gateway.answers.video_store import video_store
from gateway.app import create_app
from gateway.dialects.realtime.events import MAX_EVENT_CHARACTERS
from gateway.dialects.responses.store import ResponseStore
from gateway.http.protocol import protocols
from gateway.listening.detector_models import OnnxSilero
from gateway.listening.onnx import ModelFileError
from gateway.listening.turn_model import TurnModel
from gateway.pipeline.config import load_pipeline
from gateway.settings import GatewaySettings
from gateway.store.errors import StoreError, StoreUnavailable
from gateway.store.postgres import database_of
from gateway.workers.supervisor import supervise
from gateway.workers.worker import Worker
from gateway.yaml_source import YamlError
from services.common.rpc import tls
from services.common.telemetry import logs, tracing

# Beyond what a realtime event may have, which is refused by an error. A longer message ends the connection: it must not
# be held in memory.
_MAX_WEBSOCKET_MESSAGE_BYTES = 2 * MAX_EVENT_CHARACTERS

_NOT_STARTED = 3  # exit status, e.g. as the port is taken: uvicorn has logged why


def main() -> None:
    """Serves until SIGTERM or SIGINT."""
    settings, worker = GatewaySettings.load(), Worker.of_this_process()
    if worker is not None:
        settings = worker.settings(settings)
    logs.configure(settings.log_level, "gateway" if worker is None else f"gateway-{worker.number}")
    try:
        pipeline = load_pipeline(settings.pipeline, settings.stage, settings.aligner)
        app = create_app(settings, pipeline, tls.load(settings), worker)
        tracing.configure("gateway")
        structlog.get_logger().info("starting", settings=settings.model_dump(mode="json"))
        if unknown := [name for name in settings.hosted_tools if name not in TOOLS]:
            sys.exit(f"--hosted-tools: there is no tool {unknown[0]!r}; use {', '.join(TOOLS)}")
        if settings.speech_detector is not None:
            OnnxSilero(settings.speech_detector)
        if settings.turn_model is not None:
            TurnModel(settings.turn_model).close()
        check_stores = partial(_check_stores, makes_videos=pipeline.outputs.video is not None)
        if worker is None and settings.workers > 1:
            sys.exit(supervise(settings, check_stores))
        if worker is None:
            check_stores(settings)
    except (YamlError, SigningKeyError, StoreError, ModelFileError) as error:
        sys.exit(str(error))
    # of WebSockets, of which the middleware logs a line as of other requests
    logging.getLogger("uvicorn.error").addFilter(lambda record: "WebSocket" not in str(record.msg))
    # uvicorn drains on SIGTERM, then raises it again: a drained stop is a success
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server = uvicorn.Server(server_config(app, settings))
    with contextlib.suppress(KeyboardInterrupt):
        server.run(None if worker is None else worker.listen(settings.host))
    if not server.started:
        sys.exit(_NOT_STARTED)


def _check_stores(settings: GatewaySettings, makes_videos: bool) -> None:
    """Raises StoreError: something cannot be kept, whatever is tried later."""
    database = database_of(settings.database_url)
    try:
        if makes_videos:
            video_store(settings, database).check()
        if has_files(settings):
            FileStore(database or settings.files_dir, settings.max_files_bytes, settings.max_files_per_key).check()
        if place := database or settings.responses_dir:
            ResponseStore(place, settings.response_ttl_s, settings.max_response_bytes).check()
    except StoreUnavailable as error:  # it may start after this gateway
        structlog.get_logger().error("what is stored answers 503 until the database is reached", error=str(error))
    if database is not None:
        database.close()


def server_config(app: ASGIApp, settings: GatewaySettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        **protocols(settings),
        ws_max_size=_MAX_WEBSOCKET_MESSAGE_BYTES,
        ws_per_message_deflate=False,
        ws_ping_timeout=60.0,  # a client's machine may be busy; uvicorn's 20 s ended sessions that lived
        log_config=None,  # uvicorn's records go through ours
        access_log=False,  # the middleware logs requests, with their ids
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=int(settings.drain_timeout_s) or 1,
    )


if __name__ == "__main__":
    main()
