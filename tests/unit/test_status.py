"""What a failed call says, as a StageError."""

import grpc
import pytest

from services.common.errors import InternalError, Unavailable
from services.common.status import from_rpc_error


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", Unavailable),
        # What gRPC's core said of stages that were killed between two messages.
        (grpc.StatusCode.UNKNOWN, "Stream removed (recvmsg:Connection reset by peer (104))", Unavailable),
        (grpc.StatusCode.UNKNOWN, "Stream removed (Socket closed)", Unavailable),
        (grpc.StatusCode.UNKNOWN, "Unexpected <class 'ValueError'>", InternalError),
    ],
)
def test_a_lost_peer_is_unavailable_whatever_grpc_calls_it(code: grpc.StatusCode, details: str, kind: type):
    nothing = grpc.aio.Metadata()
    error = from_rpc_error(grpc.aio.AioRpcError(code, nothing, nothing, details=details))
    assert type(error) is kind
    assert str(error) == details
