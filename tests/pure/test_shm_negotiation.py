"""Who is lent memory, and what becomes of those who are not, or who send what nobody lent them."""

from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs

from quartet.v1 import stream_pb2, stream_pb2_grpc, tensor_pb2
from services.common.errors import InvalidInput
from services.common.stream.rows import Rows
from services.common.stream.shared_memory import open_shared_memory
from services.talker.config import TalkerSettings
from tests.support.stage.shm import BOTH, MIB, arena_directory, edge, metric, read_all, same, source, tensors
from tests.support.stage.streaming import CHANNELS, reading, subscribe

NAME = "quartet-" + "0123456789abcdef" * 2  # of no arena; each worker collects the same


@pytest.fixture
def directory():
    with arena_directory() as directory:
        yield directory


@pytest.mark.parametrize("reason", ["not_offered", "other_directory"])
async def test_who_does_not_see_the_arena_gets_messages(directory: Path, tmp_path: Path, reason: str):
    sent = tensors(1)[0]
    before = metric("stream_fallback_bytes_total", transport="shared_memory", reason=reason)
    async with edge(directory, reads=("inline",)) as (hub, transport, address):
        transports = ("inline",) if reason == "not_offered" else BOTH
        with reading(tmp_path, *transports), capture_logs() as told:
            for name in ("first", "second"):
                with hub.open(name, ["big"]) as stream:
                    stream.start(0)
                    stream.put([Rows("big", 0, sent)])
                    stream.finish(16)
                    async with subscribe(source(address, name), "r", []) as messages:
                        assert same((await read_all(messages))["big"], sent)
        assert transport.arena.used_bytes == 0
    assert metric("stream_fallback_bytes_total", transport="shared_memory", reason=reason) - before == 2 * sent.nbytes
    (line,) = told  # once for this kind of consumer
    assert (line["event"], line["transport"], line["shared_memory_reason"]) == ("edge", "inline", reason)


class Liar(stream_pb2_grpc.TensorStreamServiceServicer):
    """A producer that sends `rows` whoever asks."""

    def __init__(self, rows: stream_pb2.Rows) -> None:
        self._rows = rows

    async def Subscribe(self, request_iterator, context):
        await context.send_initial_metadata(())
        await anext(request_iterator)  # else the call may have ended before the subscription is written
        yield stream_pb2.SubscribeResponse(header=stream_pb2.StreamHeader())
        yield stream_pb2.SubscribeResponse(chunk=stream_pb2.StreamChunk(rows=[self._rows]))


@pytest.mark.parametrize(
    ("field", "arena", "size_bytes"),
    [
        ("source.states.shared_memory.arena", "../../etc/passwd", 4),
        ("source.states.shared_memory.arena", NAME, 4),
        ("source.states.shared_memory.size_bytes", NAME, 2**40),
    ],
)
async def test_a_producer_that_lies_is_found_out(directory: Path, field: str, arena: str, size_bytes: int):
    rows = stream_pb2.Rows(name="states")
    rows.tensor.dtype, rows.tensor.shape[:] = tensor_pb2.DATA_TYPE_FLOAT32, [1]
    rows.tensor.shared_memory.arena, rows.tensor.shared_memory.size_bytes = arena, size_bytes
    server = grpc.aio.server()
    stream_pb2_grpc.add_TensorStreamServiceServicer_to_server(Liar(rows), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        with reading(directory, *BOTH), pytest.raises(InvalidInput) as found:
            async with subscribe(source(address), "r", []) as messages:
                await read_all(messages)
        assert found.value.field == field
    finally:
        await server.stop(None)
        await CHANNELS.close_all()


def test_settings_turn_it_off(directory: Path):
    def settings(**changes) -> TalkerSettings:
        return TalkerSettings(model="m", shared_memory_dir=str(directory), **changes)

    with ExitStack() as stack:
        assert open_shared_memory(settings(), "shm-test") is None  # the talker's default
        assert open_shared_memory(settings(shared_memory_mib=1, transports=["inline"]), "shm-test") is None
        transport = open_shared_memory(settings(shared_memory_mib=1), "shm-test")
        assert transport
        stack.callback(transport.arena.close)
        assert metric("shared_memory_size_bytes") == MIB
        with capture_logs() as told:
            assert open_shared_memory(settings(shared_memory_mib=2**24), "shm-test") is None  # 16 TiB
        assert [line["event"] for line in told] == ["no shared memory: tensors go inline"]
    with pytest.raises(ValueError, match="must include inline"):
        settings(transports=["shared_memory"])


def test_settings_come_from_the_command_line():
    loaded = TalkerSettings.load(["--model=m", "--transports=inline", "--shared-memory-mib=5"])
    assert (loaded.transports, loaded.shared_memory_mib) == (["inline"], 5)
    assert TalkerSettings.load(["--model=m", "--transports=inline,shared_memory"]).transports == list(BOTH)


def test_settings_come_from_the_environment(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("QUARTET_TALKER_TRANSPORTS", "inline, ucx")
    assert TalkerSettings.load(["--model=m"]).transports == ["inline", "ucx"]
    monkeypatch.setenv("QUARTET_TALKER_TRANSPORTS", "inline,smoke")
    with pytest.raises(SystemExit, match="transports"):
        TalkerSettings.load(["--model=m"])
    monkeypatch.delenv("QUARTET_TALKER_TRANSPORTS")
    (tmp_path / "talker.yaml").write_text("transports: [inline, shared_memory]")
    assert TalkerSettings.load(["--model=m", "--config", str(tmp_path / "talker.yaml")]).transports == list(BOTH)
