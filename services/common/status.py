"""Maps StageErrors to gRPC statuses with google.rpc details, and back."""

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from services.common.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    NotFound,
    QueueFull,
    RequestCancelled,
    StageError,
    Unavailable,
)

_CODES: dict[type[StageError], int] = {
    InvalidInput: code_pb2.INVALID_ARGUMENT,
    QueueFull: code_pb2.RESOURCE_EXHAUSTED,
    Unavailable: code_pb2.UNAVAILABLE,
    NotFound: code_pb2.NOT_FOUND,
    AlreadyExists: code_pb2.ALREADY_EXISTS,
    RequestCancelled: code_pb2.CANCELLED,
    DeadlineExceeded: code_pb2.DEADLINE_EXCEEDED,
    InternalError: code_pb2.INTERNAL,
}
# Of gRPC itself, as UNKNOWN, when a peer dies between two messages of a stream.
_LOST = "Stream removed"
_ERRORS = {code: error for error, code in _CODES.items()}


def to_rpc_status(error: StageError) -> status_pb2.Status:
    """Status for `error`: InvalidInput carries BadRequest.FieldViolation, QueueFull carries RetryInfo."""
    status = status_pb2.Status(code=_CODES.get(type(error), code_pb2.INTERNAL), message=str(error))
    detail = any_pb2.Any()
    if isinstance(error, InvalidInput):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.reason)
        detail.Pack(error_details_pb2.BadRequest(field_violations=[violation]))
        status.details.append(detail)
    elif isinstance(error, QueueFull):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(error.retry_after_s * 1000))
        detail.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        status.details.append(detail)
    return status


async def abort(context: grpc.aio.ServicerContext, error: StageError) -> None:
    """Ends the call with the status of `error`. Never returns."""
    status = rpc_status.to_status(to_rpc_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)


def from_rpc_error(error: grpc.aio.AioRpcError) -> StageError:
    """The StageError behind a failed call; statuses that no stage raises become InternalError."""
    message = error.details() or error.code().name
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # an AioRpcError has what it reads
    except ValueError:  # details that contradict the status: trust the status
        status = None
    for detail in status.details if status else ():
        bad_request, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad_request) and bad_request.field_violations:
            violation = bad_request.field_violations[0]
            return InvalidInput(violation.field, violation.description)
        if detail.Unpack(retry):
            return QueueFull(message, retry.retry_delay.ToMilliseconds() / 1000)
    kind = _ERRORS.get(error.code().value[0], InternalError)
    if error.code() is grpc.StatusCode.UNKNOWN and message.startswith(_LOST):
        kind = Unavailable
    if kind is InvalidInput:
        return InvalidInput("request", message)
    return kind(message)
