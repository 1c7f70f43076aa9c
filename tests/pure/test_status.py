"""What a failed call says, as a StageError."""

import grpc
import pytest
from grpc_status import rpc_status

from services.common.errors import (
    ContextTooLong,
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    InvalidMedia,
    NotFound,
    QueueFull,
    RequestCancelled,
    StageError,
    StageLost,
    TooManyLogprobs,
    TooManyMedia,
    Unavailable,
)
from services.common.rpc.status import from_rpc_error, to_rpc_status

Code = grpc.StatusCode


def failed(code: grpc.StatusCode, details: str, trailing: tuple = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=details)


def sent(error: StageError) -> grpc.aio.AioRpcError:
    """The call that a stage has ended with `error`."""
    status = rpc_status.to_status(to_rpc_status(error))
    return failed(status.code, status.details, status.trailing_metadata)


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (Code.UNAVAILABLE, "Socket closed"),
        (Code.UNAVAILABLE, "recvmsg:Connection reset by peer"),
        (Code.UNAVAILABLE, "GOAWAY received; Error code: 2; Debug Text: "),
        (Code.UNAVAILABLE, "failed to connect to all addresses; last error: ipv4:10.1.2.3:50052: Connection refused"),
        # What gRPC's core said of stages that were killed between two messages.
        (Code.UNKNOWN, "Stream removed (recvmsg:Connection reset by peer (104))"),
        (Code.UNKNOWN, "Stream removed (Socket closed)"),
        # What grpc.aio said of one that died while the subscription was written to it.
        (Code.INTERNAL, "Internal error from Core"),
    ],
)
def test_a_lost_peer_is_named_and_what_grpc_calls_it_is_for_the_log(code: grpc.StatusCode, details: str):
    error = from_rpc_error(failed(code, details), "thinker")
    assert isinstance(error, StageLost)
    assert (str(error), error.origin) == ("the thinker went away while it answered", "thinker")
    assert error.detail == details


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        (Code.UNKNOWN, "Unexpected <class 'ValueError'>", InternalError),
        (Code.INTERNAL, "Exception deserializing response!", InternalError),
        (Code.RESOURCE_EXHAUSTED, "Received message larger than max (20000000 vs. 16777216)", InternalError),
        (Code.CANCELLED, "CANCELLED", RequestCancelled),
        (Code.DEADLINE_EXCEEDED, "Deadline Exceeded", DeadlineExceeded),
    ],
)
def test_other_words_of_grpc_are_no_loss(code: grpc.StatusCode, details: str, kind: type):
    error = from_rpc_error(failed(code, details), "thinker")
    assert (type(error), error.origin) == (kind, "thinker")


@pytest.mark.parametrize(
    "error",
    [
        InvalidInput("sampling.top_p", "too low"),
        ContextTooLong("messages", "9 tokens; at most 8 are taken"),
        TooManyMedia("messages[2].content[0]", "is one audio too many; at most 2 are taken"),
        TooManyLogprobs("sampling.top_logprobs", "are too many"),
        InvalidMedia("messages[2].content[0]", "the file is empty"),
        QueueFull("full", 7.0),
        StageLost("thinker", "10.0.0.1:50052: Socket closed"),
        Unavailable("draining"),
        NotFound("stream s"),
        InternalError("oh"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_stays_what_it_is_and_where_it_began_over_several_stages(error: StageError):
    error.origin = "thinker"
    to_talker = from_rpc_error(sent(error), "thinker")
    to_code2wav = from_rpc_error(sent(to_talker), "talker")
    heard = from_rpc_error(sent(to_code2wav), "code2wav")
    assert type(heard) is type(error)
    assert str(heard) == str(error)
    assert vars(heard) == vars(error)


def test_an_error_without_an_origin_began_where_it_was_called():
    assert from_rpc_error(sent(Unavailable("draining")), "talker").origin == "talker"
