"""The places that requests take."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from fastapi import Request

from gateway import metrics
from gateway.access.keys import ApiKey
from gateway.access.usage import Place
from gateway.gateway import Gateway
from gateway.openai.errors import from_failure
from gateway.pipeline.job import StageFailure
from services.common.rpc.errors import QueueFull


async def admitted(http: Request) -> AsyncIterator[Gateway]:
    """Holds one of the gateway's places, and one of the API key's, until the response is sent or the client is gone.

    `request.state.place` is the key's, for what the request starts and leaves running; None without keys.
    """
    gateway: Gateway = http.app.state.gateway
    try:
        # the key's rate is counted last: what the gateway refuses does not use it up
        with gateway.admission.admit(), _place(http) as http.state.place, metrics.RUNNING.track_inprogress():
            yield gateway
    except QueueFull as error:
        raise from_failure(StageFailure("gateway", error)) from None


@contextmanager
def _place(http: Request) -> Iterator[Place | None]:
    key: ApiKey | None = getattr(http.state, "key", None)
    if key is None:
        yield None
        return
    with key.usage.request(key.entry) as place:
        yield place
