"""Errors as clients see them."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from services.common import errors
from services.common.text import without_insides

# What one stage refuses of another's stream: not the client's fault, and not in its words.
_BETWEEN_STAGES = {"source", "rows", "header", "input", "codes", "rope_positions", "hidden_states", "output_stream_id"}
_CODES = {
    errors.ContextTooLong: "context_length_exceeded",
    errors.InvalidMedia: "invalid_media",
    errors.TooManyLogprobs: "too_many_logprobs",
}
_TRY_AGAIN_S = 1  # another replica may serve at once; a stage that starts anew is asked for until it does


@dataclass(eq=False)
class ApiError(Exception):
    """A refusal as the client sees it.

    Attributes:
        status: of HTTP.
        message: the fault and its remedy.
        param: request field at fault.
        kind: OpenAI's `error.type`; default by status.
        log: fields for the log line, hidden from clients.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    kind: str = ""
    retry_after_s: float | None = None
    log: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        super().__init__(self.message)
        self.kind = self.kind or ("invalid_request_error" if self.status < 500 else "server_error")
        self.log = {"code": self.code}

    def rename(self, param: str) -> None:
        """Names another field of the request as the one at fault, `param`, in the message too."""
        if self.param and self.message.startswith(self.param):
            self.message = param + self.message.removeprefix(self.param)
        self.param = param

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def invalid(param: str, reason: str, code: str = "invalid_value") -> ApiError:
    """A 400 for the field `param`."""
    return ApiError(400, f"{param}: {reason}", param, code)


def gateway_fault(where: str = "") -> ApiError:
    """A bug; `where` points into the log."""
    message = f"internal error; the gateway's log has the details{where}"
    return ApiError(500, message, None, "internal_error")


def from_error(kind: str, error: errors.StageError) -> ApiError:
    """`kind` is the stage's kind or "gateway", unless the error has an `origin`."""
    stage = error.origin or kind
    refusal = _api_error(stage, error)
    refusal.message = without_insides(refusal.message)
    # a stage's reason for a refusal may quote the user
    refusal.log |= {"failed_stage": stage, "error": refusal.param if refusal.status == 400 else str(error)}
    if error.detail:
        refusal.log["detail"] = error.detail
    return refusal


def _api_error(stage: str, error: errors.StageError) -> ApiError:
    match error:
        case errors.InvalidInput() if error.field.split(".")[0] not in _BETWEEN_STAGES:
            param = request_field(stage, error.field)
            return ApiError(400, f"{param}: {error.reason}", param, _CODES.get(type(error), "invalid_value"))
        case errors.QueueFull():
            return ApiError(429, f"{stage}: {error}", None, "queue_full", "rate_limit_error", error.retry_after_s)
        case errors.Unavailable() | errors.RequestCancelled() | errors.NotFound():
            message = f"{error}; try again in {_TRY_AGAIN_S} s"
            return ApiError(503, message, None, "stage_unavailable", "service_unavailable_error", _TRY_AGAIN_S)
        case errors.DeadlineExceeded():
            return ApiError(504, str(error), None, "deadline_exceeded", "timeout_error")
        case _:
            message = f"{stage}: internal error; the stage's log has the details under this request id"
            return ApiError(500, message, None, "internal_error")


_THINKER_FIELDS = (
    (r"^sampling\.json_schema.*", "response_format.json_schema.schema"),
    (r"^sampling\.json_object.*", "response_format"),
    (r"^sampling\.(regex|choice|grammar|structural_tag).*", r"structured_outputs.\1"),
    (r"^sampling\.", ""),
    (r"^chat_template_kwargs_json.*", "quartet.thinker.chat_template_kwargs"),
    (r"^use_audio_in_video", "quartet.thinker.use_audio_in_video"),
    (r"^video_frames\.count", "media_io_kwargs.video.num_frames"),
    (r"^video_frames\.per_s", "media_io_kwargs.video.fps"),
    (r"^video_frames", "media_io_kwargs.video"),
    (r"^(tools\[\d+\])\.(name|description)", r"\1.function.\2"),
    (r"^(tools\[\d+\])\.parameters_json", r"\1.function.parameters"),
    (r"^tool_choice\.name", "tool_choice.function.name"),
    (r"\.arguments_json", ".function.arguments"),
)
_TALKER_FIELDS = (
    (r"^speaker$", "audio.voice"),
    (r"^sampling\.", "quartet.talker."),
    (r"^(token_ids|text)$", "messages"),
    (r"^text\.", ""),
)
_DIFFUSION_FIELDS = (
    (r"^(width|height)\b.*", "size"),
    (r"^count\b.*", "n"),
    (r"^audio_s\b.*", "seconds"),
    (r"^loras\b.*", "lora"),
    (r"^previews\b.*", "partial_images"),
    (r"^images\b.*", "image"),
    (r"^(arguments|control_images)\b", r"quartet.dit.\1"),
)
_EMBEDDER_FIELDS = (
    (r"^inputs(\[\d+\])(\.text|\.token_ids)?", r"input\1"),
    (r"^inputs\b", "input"),
    (r"^queries\b.*", "query"),
    (r"^truncate_tokens", "truncate_prompt_tokens"),
    (r"^max_document_tokens", "max_tokens_per_doc"),
)
_ALIGNER_FIELDS = ((r"^(pcm16|text)$", "file"),)
_FIELDS = {
    "thinker": _THINKER_FIELDS,
    "talker": _TALKER_FIELDS,
    "dit": _DIFFUSION_FIELDS,
    "encoder": _DIFFUSION_FIELDS,
    "embedder": _EMBEDDER_FIELDS,
    "aligner": _ALIGNER_FIELDS,
}


def request_field(stage: str, field: str) -> str:
    """The request's field behind a stage's `field`: ("talker", "speaker") is "audio.voice"."""
    field = field.removeprefix("start.")
    for pattern, replacement in _FIELDS.get(stage, ()):
        field, count = re.subn(pattern, replacement, field)
        if count:
            break
    return field


@contextmanager
def in_own_terms(own_name: Callable[[str], str] = str, kind: str = "gateway") -> Iterator[None]:
    """Turns errors of stages into refusals, and gives the field at fault the name that `own_name` has for it.

    Args:
        own_name: the request's name of a field that a chat, or another request made of this one, has.
        kind: as of `from_error`.

    Raises:
        ApiError: for a StageError, or as it was raised within.
    """
    try:
        yield
    except (errors.StageError, ApiError) as error:
        refusal = error if isinstance(error, ApiError) else from_error(kind, error)
        if refusal.param is not None:
            refusal.rename(own_name(refusal.param))
        if refusal is error:
            raise
        raise refusal from error
