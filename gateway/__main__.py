"""Starts the gateway: `python -m gateway --pipeline FILE [--stage NAME=HOST:PORT ...]`."""

import logging
import signal
import sys

import structlog
import uvicorn

from gateway.app import create_app
from gateway.pipeline.config import load_pipeline
from gateway.realtime.events import MAX_EVENT_CHARACTERS
from gateway.realtime.onnx import ModelFileError
from gateway.realtime.silero import OnnxSilero
from gateway.realtime.turn_model import TurnModel
from gateway.settings import GatewaySettings
from gateway.store import StoreError
from gateway.strict import YamlError
from gateway.video_store import VideoStore
from services.common.rpc import tls
from services.common.telemetry import logs, tracing

# Beyond what a realtime event may have, which is refused by an error. A longer message ends the connection: it must not
# be held in memory.
_MAX_WEBSOCKET_MESSAGE_BYTES = 2 * MAX_EVENT_CHARACTERS


def main() -> None:
    """Reads settings and pipeline, then serves until SIGTERM or SIGINT; running requests are finished first."""
    settings = GatewaySettings.load()
    logs.configure(settings.log_level, "gateway")
    try:
        pipeline = load_pipeline(settings.pipeline, settings.stage)
        app = create_app(settings, pipeline, tls.load(settings))
        tracing.configure("gateway")
        structlog.get_logger().info("starting", settings=settings.model_dump(mode="json"))
        if pipeline.outputs.video is not None:
            VideoStore(settings.jobs_dir, settings.video_ttl_s).check()
        if settings.speech_detector is not None:
            OnnxSilero(settings.speech_detector)
        if settings.turn_model is not None:
            TurnModel(settings.turn_model).close()
    except (YamlError, StoreError, ModelFileError) as error:
        sys.exit(str(error))
    # of WebSockets, of which the middleware logs a line as of other requests
    logging.getLogger("uvicorn.error").addFilter(lambda record: "WebSocket" not in str(record.msg))
    # uvicorn drains on SIGTERM, then raises it again: a drained stop is a success
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    uvicorn.run(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http="httptools",
        ws="websockets-sansio",
        ws_max_size=_MAX_WEBSOCKET_MESSAGE_BYTES,
        ws_per_message_deflate=False,
        ws_ping_timeout=60.0,  # a client's machine may be busy; uvicorn's 20 s ended sessions that lived
        log_config=None,  # uvicorn's records go through ours
        access_log=False,  # the middleware logs requests, with their ids
        timeout_graceful_shutdown=int(settings.drain_timeout_s) or 1,
    )


if __name__ == "__main__":
    main()
