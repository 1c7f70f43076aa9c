"""`GET /version` and `GET /load`, as vLLM has them."""

from importlib.metadata import version
from typing import Annotated

from fastapi import APIRouter, Depends, Request

from gateway.answers.gateway import Gateway

router = APIRouter(tags=["operations"])


def _gateway(http: Request) -> Gateway:
    return http.app.state.gateway


@router.get("/version")
async def show_version() -> dict[str, str]:
    """Quartet's version."""
    return {"version": version("quartet")}


@router.get("/load")
async def show_load(gateway: Annotated[Gateway, Depends(_gateway)]) -> dict[str, int]:
    """Requests in progress in the process that answers."""
    return {"server_load": gateway.admission.in_flight}
