"""The line of a request in a stage's log has nothing that the user said."""

import grpc
import pytest
from structlog.testing import capture_logs

from quartet.v1 import thinker_pb2, thinker_pb2_grpc
from services.common.errors import InvalidInput, QueueFull, StageError
from services.common.rpc.call import Admission, serve_call
from services.common.rpc.status import from_rpc_error

MARK = "ZQMARK7"


class Refusing(thinker_pb2_grpc.ThinkerServiceServicer):
    def __init__(self, error: StageError) -> None:
        self.error = error
        self.admission = Admission(1, 0, "thinker")
        self.admission.open()

    async def Generate(self, request_iterator, context):
        await anext(request_iterator)  # as a stage does: a client that still writes may not see why it is refused
        async with serve_call("thinker", "r-1", context, self.admission):
            raise self.error
        yield


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("error", "logged"),
    [
        (InvalidInput("tools[0].parameters_json", f'Unsupported type "{MARK}"'), "tools[0].parameters_json is refused"),
        (QueueFull("8 requests run"), "8 requests run"),
    ],
)
async def test_a_refusal_is_told_to_the_client_and_its_field_to_the_log(error, logged) -> None:
    server = grpc.aio.server()
    thinker_pb2_grpc.add_ThinkerServiceServicer_to_server(Refusing(error), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        with capture_logs() as lines:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                call = thinker_pb2_grpc.ThinkerServiceStub(channel).Generate(iter([thinker_pb2.GenerateRequest()]))
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
        assert str(from_rpc_error(caught.value)) == str(error)
        assert [line["error"] for line in lines if line["event"] == "request"] == [logged]
        assert MARK not in str(lines)
    finally:
        await server.stop(0)
