"""What can go wrong in a stage, in the words of a person."""


class StageError(Exception):
    """Base of the errors that a stage reports to its caller. `str(error)` is meant for people.

    Attributes:
        status: name of the gRPC status that tells it.
        code: what the kind of error does not say, for programs; "" for most.
        origin: kind of the stage that it began in ("thinker"), where another one reports it; else "".
        detail: what only logs are told: addresses, the words of a transport.
    """

    status = "INTERNAL"
    code = ""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.origin = self.detail = ""


class InvalidInput(StageError):
    """The request is at fault.

    Args:
        field: path of the field at fault, e.g. "sampling.top_p".
        reason: what is wrong with it and what would be right.
    """

    status = "INVALID_ARGUMENT"

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class ContextTooLong(InvalidInput):
    """The prompt is longer than the model takes."""

    code = "CONTEXT_LENGTH"


class TooManyMedia(InvalidInput):
    """The prompt has more images, sounds or videos than the stage takes."""

    code = "TOO_MANY_MEDIA"


class QueueFull(StageError):
    """The stage runs and queues all it may; the same request can succeed after `retry_after_s` seconds."""

    status = "RESOURCE_EXHAUSTED"

    def __init__(self, reason: str, retry_after_s: float = 1.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class Unavailable(StageError):
    """The stage is loading, draining or gone, or the stage before it is."""

    status = "UNAVAILABLE"


class StageLost(Unavailable):
    """A stage is gone, or its connection: its caller found that, it did not say so.

    Args:
        stage: its kind, e.g. "thinker"; "" if the caller does not know.
        detail: how the caller found it.
    """

    code = "STAGE_LOST"

    def __init__(self, stage: str, detail: str) -> None:
        super().__init__(f"the {stage or 'producer'} went away while it answered")
        self.origin, self.detail = stage, detail


class NotFound(StageError):
    """What the request names does not exist."""

    status = "NOT_FOUND"


class AlreadyExists(StageError):
    """What the request asks for has been given to another."""

    status = "ALREADY_EXISTS"


class RequestCancelled(StageError):
    """The caller, or the stage before, gave the request up."""

    status = "CANCELLED"


class DeadlineExceeded(StageError):
    """The request's time ran out."""

    status = "DEADLINE_EXCEEDED"


class InternalError(StageError):
    """A fault of ours: details are in the stage's log."""
