"""Starts the process of calls: `python -m gateway.webrtc --gateway http://HOST:PORT`."""

import contextlib
import signal
import sys

import uvicorn

try:
    from gateway.webrtc.server import create_app
except ModuleNotFoundError as error:
    sys.exit(f"calls by WebRTC need {error.name}: pip install 'quartet[webrtc]'")
from gateway.webrtc.settings import WebRtcSettings
from services.common.telemetry import logs

_NOT_STARTED = 3  # exit status, e.g. as a port is taken
_DRAIN_S = 5


def main() -> None:
    """Serves until SIGTERM or SIGINT."""
    settings = WebRtcSettings.load()
    logs.configure(settings.log_level, "webrtc")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    config = uvicorn.Config(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        log_config=None,
        access_log=False,
        ws="websockets-sansio",
        timeout_graceful_shutdown=_DRAIN_S,
    )
    server = uvicorn.Server(config)
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    if not server.started:
        sys.exit(_NOT_STARTED)


if __name__ == "__main__":
    main()
