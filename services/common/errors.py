"""Errors that a stage reports, in words for people."""


class StageError(Exception):
    """Base of all. `str(error)` is for people.

    Attributes:
        status: name of its gRPC status.
        code: a narrower kind, for programs; "" for most.
        origin: kind of the stage that it began in, if another one reports it; else "".
        detail: for logs only: addresses, a transport's words.
    """

    status = "INTERNAL"
    code = ""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.origin = self.detail = ""


class InvalidInput(StageError):
    """The request is at fault.

    Args:
        field: its path, e.g. "sampling.top_p".
        reason: what is wrong and what would be right.
    """

    status = "INVALID_ARGUMENT"

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


def require(holds: object, field: str, reason: str) -> None:
    """Raises InvalidInput, unless `holds` is true."""
    if not holds:
        raise InvalidInput(field, reason)


class ContextTooLong(InvalidInput):
    code = "CONTEXT_LENGTH"


class TooManyMedia(InvalidInput):
    code = "TOO_MANY_MEDIA"


class TooManyLogprobs(InvalidInput):
    code = "TOO_MANY_LOGPROBS"


class InvalidMedia(InvalidInput):
    """A file is broken, or breaks a limit."""

    code = "INVALID_MEDIA"


class QueueFull(StageError):
    """The stage runs and queues all it may; retry after `retry_after_s` seconds."""

    status = "RESOURCE_EXHAUSTED"

    def __init__(self, reason: str, retry_after_s: float = 1.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class Unavailable(StageError):
    """The stage is loading, draining or gone, or the stage before it is."""

    status = "UNAVAILABLE"


class StageLost(Unavailable):
    """A caller found that a stage, or its connection, is gone.

    Args:
        stage: its kind, e.g. "thinker"; "" if unknown.
        detail: how the caller found it.
    """

    code = "STAGE_LOST"

    def __init__(self, stage: str, detail: str) -> None:
        super().__init__(f"the {stage or 'producer'} went away while it answered")
        self.origin, self.detail = stage, detail


class NotFound(StageError):
    status = "NOT_FOUND"


class AlreadyExists(StageError):
    """What the request asks for is another's."""

    status = "ALREADY_EXISTS"


class RequestCancelled(StageError):
    """The caller, or the stage before, gave up."""

    status = "CANCELLED"


class DeadlineExceeded(StageError):
    status = "DEADLINE_EXCEEDED"


class InternalError(StageError):
    """A fault of ours; the stage's log has the details."""
