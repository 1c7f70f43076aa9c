"""The places that requests take."""

from collections.abc import AsyncIterator

from fastapi import Request

from gateway import metrics
from gateway.gateway import Gateway
from gateway.openai.errors import from_failure
from gateway.pipeline.job import StageFailure
from services.common.errors import QueueFull


async def admitted(http: Request) -> AsyncIterator[Gateway]:
    """Holds one of the gateway's places until the response is sent."""
    gateway: Gateway = http.app.state.gateway
    try:
        with gateway.admission.admit(), metrics.RUNNING.track_inprogress():
            yield gateway
    except QueueFull as error:
        raise from_failure(StageFailure("gateway", error)) from None
