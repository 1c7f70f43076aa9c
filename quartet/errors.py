"""Errors of the Python API."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cli.terminal import CommandError
from gateway.errors import ApiError, from_error
from gateway.yaml_source import YamlError
from services.common.errors import StageError

# Options that have another name in an HTTP request.
_OWN_NAMES = {"audio.voice": "voice"}


class Error(Exception):
    """A prompt could not be answered; the message says what is wrong and how to fix it.

    Attributes:
        field: option or message part at fault, e.g. "messages[0].content[1]".
        code: for programs, e.g. "invalid_value", "context_length_exceeded", "stage_unavailable".
    """

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field, self.code = field, code

    def __reduce__(self) -> tuple[Any, ...]:  # pickles the attributes, too
        return type(self), (str(self), self.field, self.code)


class StartError(Error):
    """The stages cannot be started or reached; the message may have part of a log."""


def refused(field: str, reason: str) -> Error:
    return Error(f"{field}: {reason}", field, "invalid_value")


def from_api(refusal: ApiError) -> Error:
    if refusal.param is not None:
        refusal.rename(_OWN_NAMES.get(refusal.param, refusal.param))
    message = refusal.message
    if refusal.status == 500 and (detail := refusal.log.get("error")):  # the caller owns the stages and may see it
        message = f"{message}: {detail}"
    return Error(message, refusal.param, refusal.code)


@contextmanager
def as_errors() -> Iterator[None]:
    """Turns errors of gateway and stages into `Error`."""
    try:
        yield
    except ApiError as refusal:
        raise from_api(refusal) from refusal
    except StageError as error:
        raise from_api(from_error("gateway", error)) from error


@contextmanager
def as_start_errors() -> Iterator[None]:
    """Turns errors of a start into `StartError`, with Python's arguments in place of flags."""
    try:
        yield
    except (CommandError, YamlError) as error:
        flag = re.match(r"--([a-z-]+)", str(error))
        field = flag[1].replace("-", "_") if flag else None
        message = str(error) if flag is None else f"{field}{str(error)[flag.end() :]}"
        raise StartError(message, field, "start_failed") from error
