"""A gateway in the tests' own process, and scripted stages behind it."""

import asyncio
import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import httpx
import openai
import uvicorn

from cli.plan import PIPELINE as SPEECH
from gateway import app as gateway_app
from gateway.app import create_app
from gateway.http.protocol import protocols
from gateway.pipeline.config import load_pipeline
from gateway.settings import GatewaySettings
from quartet.v1 import server_info_pb2
from tests.support.scripted.stages import scripted_stages

METRICS_KEPT_S = gateway_app.METRICS_KEPT_S
gateway_app.METRICS_KEPT_S = 0.0  # most tests read what has just happened
HEALTH_TIMEOUT_S = 60.0  # a stage that is only late is not down
KEEP_ALIVE_S = 24 * 3600  # no connection ends while a client is about to use it
# Addresses, ports, and what gRPC and sockets say: for logs.
NOT_FOR_CLIENTS = re.compile(
    r"\d+\.\d+\.\d+\.\d+|localhost|:\d{3,}|socket|recvmsg|removed|refused|reset|goaway|cancelled", re.IGNORECASE
)


class Running:
    """A gateway on a port, its stages and an HTTP client."""

    def __init__(self, app, stages, url: str) -> None:
        self.app, self.stages, self.scripts, self.url = app, stages, stages.scripts, url
        self.http, self.openai = clients(self.url)

    async def chat(self, body: dict, **options) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json=body, **options)

    async def refusal(self, body: dict) -> tuple[int, dict]:
        response = await self.chat(body)
        return response.status_code, response.json()["error"]

    async def events(self, body: dict) -> list[dict]:
        """The events of a stream, without [DONE]."""
        response = await self.chat(body | {"stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.text.split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        if lines[-1] == "data: [DONE]":
            lines.pop()
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    async def until(self, condition) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.005)

    async def publish_info(self, name: str) -> None:
        """Returns when the gateway has what the test changed in the stage's info."""
        published, stage = self.stages.infos[name], self.app.state.gateway.pipeline.by_name[name]
        published.revision += 1
        await self.until(lambda: stage.info == published.info)

    async def held(self) -> None:
        """Returns when all stages stand still, as their scripts tell them to."""
        async with asyncio.timeout(60):
            await asyncio.gather(*(script.holding.wait() for script in self.scripts.values()))

    async def reset(self) -> None:
        """As it was when it had started: for the next test."""
        gateway = self.app.state.gateway
        for script in self.scripts.values():
            script.go_on()
        await self.until(lambda: gateway.admission.in_flight == 0)
        for script in self.scripts.values():
            await script.reset()
        await self.until(lambda: gateway.pipeline.ready)


def clients(url: str) -> tuple[httpx.AsyncClient, openai.AsyncOpenAI]:
    """Those of a gateway without TLS: reading the system's certificates would take longer than most tests."""
    http = openai.DefaultAsyncHttpxClient(verify=False)
    return (
        httpx.AsyncClient(base_url=url, timeout=60, verify=False),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60, http_client=http),
    )


@contextlib.asynccontextmanager
async def serving(app, settings: GatewaySettings):
    """`app` on a port of this machine: its URL."""
    options = {"log_config": None, "access_log": False, "timeout_keep_alive": KEEP_ALIVE_S, **protocols(settings)}
    port = settings.port if "port" in settings.model_fields_set else 0
    server = uvicorn.Server(uvicorn.Config(app, port=port, **options))
    server.capture_signals = contextlib.nullcontext  # signals are pytest's  # pyright: ignore[reportAttributeAccessIssue]
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
        if task.done():
            raise RuntimeError("the gateway did not start")
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def running(
    pipeline: Path = SPEECH,
    talker: server_info_pb2.TalkerInfo | None = None,
    more: Mapping[str, server_info_pb2.GetServerInfoResponse] = MappingProxyType({}),
    **settings,
):
    """A gateway of `pipeline` in this process, before scripted stages: their names say their kinds. The talker says of
    itself what `talker` does, other stages what `more` has, by name, besides what they say anyway."""
    async with scripted_stages(*load_pipeline(pipeline).stages) as stages:
        if talker is not None:
            stages.infos["talker"].info.talker.CopyFrom(talker)
        for name, info in more.items():
            stages.infos[name].info.MergeFrom(info)
        loaded = GatewaySettings(pipeline=pipeline, **{"health_timeout_s": HEALTH_TIMEOUT_S, **settings})
        app = create_app(loaded, load_pipeline(pipeline, stages.addresses))
        async with serving(app, loaded) as url:
            gateway = Running(app, stages, url)
            await gateway.until(lambda: app.state.gateway.pipeline.ready)
            try:
                yield gateway
            finally:
                await gateway.http.aclose()
                await gateway.openai.close()
