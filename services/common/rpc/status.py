"""Maps StageErrors to gRPC statuses with google.rpc details, and back."""

from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar, cast

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2  # pyright: ignore[reportMissingTypeStubs]
from grpc_status import rpc_status

from services.common.errors import InternalError, InvalidInput, QueueFull, StageError, StageLost

_DOMAIN = "quartet"
_MOST_BYTES = 768  # of a text: a peer takes 8 KiB of all metadata, and what quotes a request can have any length
_Detail = TypeVar("_Detail", bound=Message)
# The error that each status stands for. RESOURCE_EXHAUSTED is QueueFull only where it says when to retry: gRPC uses it
# for a message beyond its limits, too.
_KINDS = {kind.status: kind for kind in StageError.__subclasses__() if kind is not QueueFull}
# How gRPC's text on a lost peer begins where its status is not UNAVAILABLE: it died between two messages of a stream,
# or while one was written to it.
_LOST = {grpc.StatusCode.UNKNOWN: "Stream removed", grpc.StatusCode.INTERNAL: "Internal error from Core"}


def to_rpc_status(error: StageError) -> status_pb2.Status:
    """InvalidInput carries BadRequest.FieldViolation, QueueFull RetryInfo, an error with a code or an origin ErrorInfo,
    one with a detail DebugInfo."""
    status = status_pb2.Status(code=code_pb2.Code.Value(error.status), message=_short(str(error)))
    if isinstance(error, InvalidInput):
        field, reason = _short(error.field, _MOST_BYTES // 3), _short(error.reason)
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=reason)
        _add(status, error_details_pb2.BadRequest(field_violations=[violation]))
    elif isinstance(error, QueueFull):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(error.retry_after_s * 1000))
        _add(status, error_details_pb2.RetryInfo(retry_delay=delay))
    if error.code or error.origin:
        origin = {"stage": error.origin} if error.origin else {}
        _add(status, error_details_pb2.ErrorInfo(reason=error.code or error.status, domain=_DOMAIN, metadata=origin))
    if error.detail:
        _add(status, error_details_pb2.DebugInfo(detail=_short(error.detail)))
    return status


def _short(text: str, most_bytes: int = _MOST_BYTES) -> str:
    """`text`, or its beginning and its end."""
    data = text.encode(errors="replace")
    if len(data) <= most_bytes:
        return text
    half = most_bytes // 2
    return f"{data[:half].decode(errors='ignore')} ... {data[-half:].decode(errors='ignore')}"


def _add(status: status_pb2.Status, message: Message) -> None:
    detail = any_pb2.Any()
    detail.Pack(message)
    status.details.append(detail)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: StageError) -> NoReturn:
    """Ends the call with the status of `error`."""
    status = rpc_status.to_status(to_rpc_status(error))  # pyright: ignore[reportUnknownMemberType]
    await context.abort(status.code, status.details, status.trailing_metadata)


def said_by_stage(error: grpc.aio.AioRpcError) -> bool:
    """Whether the stage's own code sent the status, not gRPC for a stage that is gone."""
    return any(key == "grpc-status-details-bin" for key, _ in error.trailing_metadata() or ())


def from_rpc_error(error: grpc.aio.AioRpcError, called: str = "") -> StageError:
    """The StageError behind a failed call; statuses that no stage raises become InternalError.

    Args:
        called: kind of the called stage, the error's origin unless that stage names another.
    """
    message = error.details() or error.code().name
    words = "" if error.code() is grpc.StatusCode.UNAVAILABLE else _LOST.get(error.code())
    if not said_by_stage(error) and words is not None and message.startswith(words):
        return StageLost(called, message)
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # an AioRpcError has what it reads
    except ValueError:  # details that contradict the status: trust the status
        status = None
    details = cast("Sequence[any_pb2.Any]", status.details if status else ())  # pyright: ignore[reportUnknownMemberType]
    info = _find(details, error_details_pb2.ErrorInfo)
    origin, detail = info.metadata.get("stage", called), _find(details, error_details_pb2.DebugInfo).detail
    if info.reason == StageLost.code:
        return StageLost(origin, detail)
    failure = _failure(error.code(), message, info.reason, details)
    failure.origin, failure.detail = origin, detail
    return failure


def _find(details: Sequence[any_pb2.Any], kind: type[_Detail]) -> _Detail:
    """The detail of `kind`; an empty one if there is none."""
    found = kind()
    any(detail.Unpack(found) for detail in details)
    return found


def _failure(code: grpc.StatusCode, message: str, reason: str, details: Sequence[any_pb2.Any]) -> StageError:
    retry = _find(details, error_details_pb2.RetryInfo)
    if retry.HasField("retry_delay"):
        return QueueFull(message, retry.retry_delay.ToMilliseconds() / 1000)
    kind = _KINDS.get(code.name, InternalError)
    if kind is InvalidInput:
        violations = _find(details, error_details_pb2.BadRequest).field_violations
        field, wrong = (violations[0].field, violations[0].description) if violations else ("request", message)
        narrower = next((each for each in InvalidInput.__subclasses__() if each.code == reason), InvalidInput)
        return narrower(field, wrong)
    return kind(message)
