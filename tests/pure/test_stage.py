"""The shell that stages share: what each has of its own when two live in one process, and what ends one."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import REGISTRY

from quartet.v1 import server_info_pb2, stream_pb2
from services.common import failures
from services.common.errors import StageLost, Unavailable
from services.common.rpc.channels import Channels
from services.common.rpc.settings import StageSettings
from services.common.stage import Stage, main
from services.common.stream.rows import Rows
from tests.support.network.certificates import credentials, make
from tests.support.stage.shm import arena_directory, read_all

SERVICE = "quartet.v1.TalkerService"
TENSOR = torch.arange(2**18, dtype=torch.float32).view(2, -1)


def settings(**values: Any) -> StageSettings:
    return StageSettings.model_validate({"model": "none", **values})


@contextlib.asynccontextmanager
async def serving(name: str, its: StageSettings) -> AsyncIterator[Stage]:
    """A stage that serves with an engine of one word."""
    stage = Stage(its, name, SERVICE)
    steps: list[str] = []

    async def load() -> str:
        steps.append("load")
        return "engine"

    async def warm_up(engine: str) -> None:
        steps.append(f"warm up {engine}")

    async def start() -> server_info_pb2.GetServerInfoResponse:
        await warm_up(await stage.load(load()))
        info = stage.describe("float32", "cpu")
        steps.append(f"describe {info.stage}")
        return info

    running = asyncio.create_task(stage.serve(start))
    try:
        async with asyncio.timeout(60):
            while not admits(stage):
                await asyncio.wait({running}, timeout=0.01)
                assert not running.done(), running.exception()
        assert steps == ["load", "warm up engine", f"describe {name}"]
        yield stage
    finally:
        stage.request_stop()
        await running


def admits(stage: Stage) -> bool:
    try:
        with stage.admission.admit():
            return True
    except Unavailable:
        return False


async def read(consumer: Stage, producer: Stage) -> torch.Tensor:
    """What `consumer` gets of a stream of `producer` with TENSOR."""
    stream_id = str(consumer.port)
    with producer.hub.open(stream_id, ["states"]) as stream:
        stream.start(0)
        stream.put([Rows("states", 0, TENSOR)])
        stream.finish(len(TENSOR))
        source = stream_pb2.StreamSource(address=f"127.0.0.1:{producer.port}", stream_id=stream_id)
        async with consumer.consumer.subscribe(source, "r", [], producer="talker") as messages:
            return (await read_all(messages))["states"]


def sent_bytes(transport: str) -> float:
    labels = {"stage": "talker", "consumer": "other", "rows": "states", "transport": transport}
    return REGISTRY.get_sample_value("quartet_stream_bytes_total", labels) or 0.0


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """A stage takes what exists out of all collections: for a process of its own, not for these tests'."""
    yield
    gc.unfreeze()


async def test_two_stages_in_one_process_have_their_own_identity_and_transports(tmp_path: Path, monkeypatch):
    ours, others = make(tmp_path / "ours", "talker", "code2wav"), make(tmp_path / "others", "talker", "code2wav")

    def files(directory: Path, name: str) -> dict[str, Path]:
        home = directory / name
        return {"tls_cert": home / "tls.crt", "tls_key": home / "tls.key", "tls_ca": home / "ca.crt"}

    with arena_directory() as arenas:
        shared = {"transports": ["inline", "shared_memory"], "shared_memory_dir": str(arenas)}
        async with (
            serving("talker", settings(**files(ours, "talker"), **shared, shared_memory_mib=4)) as talker,
            serving("code2wav", settings(**files(ours, "code2wav"), **shared)) as near,
            serving("encoder", settings(**files(ours, "code2wav"), transports=["inline"])) as inline_only,
            serving("thinker", settings(**files(others, "talker"))) as stranger,
            serving("dit", settings()) as in_the_clear,
        ):
            for consumer, transport in ((near, "shared_memory"), (inline_only, "inline")):
                before = sent_bytes(transport)
                assert torch.equal(await read(consumer, talker), TENSOR)
                assert sent_bytes(transport) - before == TENSOR.nbytes
            monkeypatch.setattr("services.common.stream.consumer.CONNECT_TIMEOUT_S", 0.3)
            # Each is who its own settings say, whoever was made last.
            for refused in (stranger, in_the_clear):
                with pytest.raises(StageLost):
                    await read(refused, talker)
            assert await health(Channels(credentials(others, "code2wav")), stranger) == "SERVING"
            assert (await health(Channels(credentials(others, "code2wav")), talker)).startswith("UNAVAILABLE")
            assert await health(Channels(), in_the_clear) == "SERVING"


async def health(channels: Channels, stage: Stage) -> str:
    stub = health_pb2_grpc.HealthStub(channels.channel(f"127.0.0.1:{stage.port}"))
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=60)  # pyright: ignore[reportAttributeAccessIssue]
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    finally:
        await channels.close_all()
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


@pytest.mark.parametrize("error", [ValueError("no/such is neither a directory\nnor a model"), OSError("no room")])
def test_what_cannot_be_loaded_ends_the_process_with_one_line_and_status_2(error: Exception, monkeypatch):
    monkeypatch.setattr("services.common.telemetry.logs.configure", lambda *_: None)

    async def load() -> server_info_pb2.GetServerInfoResponse:
        raise error

    async def serve(stage: Stage, its: StageSettings) -> None:
        await stage.serve(lambda: stage.load(load()))

    with structlog.testing.capture_logs() as lines, pytest.raises(SystemExit) as ended:
        main(settings(model="no/such"), "talker", SERVICE, serve)
    assert ended.value.code == 2
    (said,) = [line for line in lines if line["log_level"] == "critical"]
    assert said["error"] == " ".join(str(error).split())
    assert {line["log_level"] for line in lines if "exc_info" in line} <= {"debug"}


@pytest.mark.parametrize(("asked", "level"), [("1", "info"), ("", "debug")])
def test_a_fault_of_ours_at_the_start_is_one_line_and_its_traceback_is_to_be_had(asked: str, level: str, monkeypatch):
    monkeypatch.setattr("services.common.telemetry.logs.configure", lambda *_: None)
    monkeypatch.setenv(failures.TRACEBACKS, asked)

    async def load() -> server_info_pb2.GetServerInfoResponse:
        raise KeyError("ours")

    async def serve(stage: Stage, its: StageSettings) -> None:
        await stage.serve(lambda: stage.load(load()))

    with structlog.testing.capture_logs() as lines, pytest.raises(SystemExit) as ended:
        main(settings(), "talker", SERVICE, serve)
    assert ended.value.code == 1
    assert lines[-1]["event"] == failures.EVENT
    assert lines[-1]["error"] == "KeyError: 'ours'"
    assert [line["log_level"] for line in lines if "exc_info" in line] == [level]
