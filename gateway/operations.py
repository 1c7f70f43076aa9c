"""What operators ask: is it alive, is it ready, how is it doing."""

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from gateway.gateway import Gateway

router = APIRouter(tags=["operations"])


@router.get("/health")
async def health() -> dict[str, str]:
    """The process lives, whatever its stages do."""
    return {"status": "ok"}


@router.get("/ready", responses={503: {"description": "a stage does not serve"}})
async def ready(http: Request) -> JSONResponse:
    """200 if every stage serves, else 503; with the state of each stage and of each of its replicas."""
    gateway: Gateway = http.app.state.gateway
    is_ready = gateway.pipeline.ready
    body = {
        "status": "ready" if is_ready else "not ready",
        "stages": gateway.pipeline.states,
        "replicas": gateway.pipeline.replicas,
    }
    return JSONResponse(body, 200 if is_ready else 503)


@router.get("/metrics")
async def metrics() -> Response:
    """Prometheus metrics."""
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)
