"""Maps StageErrors to gRPC statuses with google.rpc details, and back."""

from collections.abc import Sequence
from typing import TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from services.common.rpc.errors import (
    AlreadyExists,
    ContextTooLong,
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    NotFound,
    QueueFull,
    RequestCancelled,
    StageError,
    StageLost,
    Unavailable,
)

_DOMAIN = "quartet"
_Detail = TypeVar("_Detail", bound=Message)
_CODES: dict[type[StageError], int] = {
    ContextTooLong: code_pb2.INVALID_ARGUMENT,
    InvalidInput: code_pb2.INVALID_ARGUMENT,
    QueueFull: code_pb2.RESOURCE_EXHAUSTED,
    StageLost: code_pb2.UNAVAILABLE,
    Unavailable: code_pb2.UNAVAILABLE,
    NotFound: code_pb2.NOT_FOUND,
    AlreadyExists: code_pb2.ALREADY_EXISTS,
    RequestCancelled: code_pb2.CANCELLED,
    DeadlineExceeded: code_pb2.DEADLINE_EXCEEDED,
    InternalError: code_pb2.INTERNAL,
}
_ERRORS = {code: error for error, code in _CODES.items()}  # of two of a code the last, which is the general one
# How gRPC's own words on a lost peer begin where its status is not UNAVAILABLE: when it died between two messages of a
# stream, and when it died while one was being written to it.
_LOST = {grpc.StatusCode.UNKNOWN: "Stream removed", grpc.StatusCode.INTERNAL: "Internal error from Core"}


def to_rpc_status(error: StageError) -> status_pb2.Status:
    """Status for `error`: InvalidInput carries BadRequest.FieldViolation, QueueFull RetryInfo; an error with a code or
    an origin ErrorInfo, one with a detail DebugInfo."""
    status = status_pb2.Status(code=_CODES.get(type(error), code_pb2.INTERNAL), message=str(error))
    if isinstance(error, InvalidInput):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.reason)
        _add(status, error_details_pb2.BadRequest(field_violations=[violation]))
    elif isinstance(error, QueueFull):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(error.retry_after_s * 1000))
        _add(status, error_details_pb2.RetryInfo(retry_delay=delay))
    if error.code or error.origin:
        reason, origin = error.code or code_pb2.Code.Name(status.code), {"stage": error.origin} if error.origin else {}
        _add(status, error_details_pb2.ErrorInfo(reason=reason, domain=_DOMAIN, metadata=origin))
    if error.detail:
        _add(status, error_details_pb2.DebugInfo(detail=error.detail))
    return status


def _add(status: status_pb2.Status, message: Message) -> None:
    detail = any_pb2.Any()
    detail.Pack(message)
    status.details.append(detail)


async def abort(context: grpc.aio.ServicerContext, error: StageError) -> None:
    """Ends the call with the status of `error`. Never returns."""
    status = rpc_status.to_status(to_rpc_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)


def said_by_stage(error: grpc.aio.AioRpcError) -> bool:
    """Whether the stage's own code sent the status, and not gRPC on behalf of a stage that is gone."""
    return any(key == "grpc-status-details-bin" for key, _ in error.trailing_metadata() or ())


def from_rpc_error(error: grpc.aio.AioRpcError, called: str = "") -> StageError:
    """The StageError behind a failed call; statuses that no stage raises become InternalError.

    Args:
        called: kind of the stage that was called: the origin of the error, unless that stage names another.
    """
    message = error.details() or error.code().name
    words = "" if error.code() is grpc.StatusCode.UNAVAILABLE else _LOST.get(error.code())
    if not said_by_stage(error) and words is not None and message.startswith(words):
        return StageLost(called, message)
    details = _details(error)
    info = _find(details, error_details_pb2.ErrorInfo)
    origin, detail = info.metadata.get("stage", called), _find(details, error_details_pb2.DebugInfo).detail
    if info.reason == StageLost.code:
        return StageLost(origin, detail)
    failure = _failure(error.code(), message, info.reason, details)
    failure.origin, failure.detail = origin, detail
    return failure


def _details(error: grpc.aio.AioRpcError) -> Sequence[any_pb2.Any]:
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # an AioRpcError has what it reads
    except ValueError:  # details that contradict the status: trust the status
        return ()
    return status.details if status else ()


def _find(details: Sequence[any_pb2.Any], kind: type[_Detail]) -> _Detail:
    """The detail of that kind; an empty one if there is none."""
    found = kind()
    any(detail.Unpack(found) for detail in details)
    return found


def _failure(code: grpc.StatusCode, message: str, reason: str, details: Sequence[any_pb2.Any]) -> StageError:
    retry = _find(details, error_details_pb2.RetryInfo)
    if retry.HasField("retry_delay"):
        return QueueFull(message, retry.retry_delay.ToMilliseconds() / 1000)
    kind = _ERRORS.get(code.value[0], InternalError)
    if kind is InvalidInput:
        violations = _find(details, error_details_pb2.BadRequest).field_violations
        field, wrong = (violations[0].field, violations[0].description) if violations else ("request", message)
        return ContextTooLong(field, wrong) if reason == ContextTooLong.code else InvalidInput(field, wrong)
    if kind is QueueFull:  # of gRPC itself: a message beyond its limits
        return InternalError(message)
    return kind(message)
