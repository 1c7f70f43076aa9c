"""Errors of stores, and the answers that clients get."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
from sqlalchemy.exc import SQLAlchemyError

from gateway.errors import ApiError

_RETRY_S = 5.0  # a database that starts anew

log = structlog.get_logger()


class StoreError(Exception):
    """Says which setting's place cannot be used, why, and what to do."""


class StoreUnavailable(StoreError):
    """The database cannot be reached now."""


class Conflict(StoreError):
    """Two transactions hindered each other, and this one was undone."""


def required(directory: Path | None, setting: str, what: str) -> Path:
    """Raises StoreError: there is no directory to keep `what` in."""
    if directory is None:
        option = setting.replace("_", "-")
        raise StoreError(f"{setting}: this user has no home directory to keep {what} in; name one with --{option}")
    return directory


def first_line(error: BaseException) -> str:
    """What the driver said, without details: they may have values, which are a client's."""
    return str(getattr(error, "orig", None) or error).strip().partition("\n")[0]


@contextmanager
def store_errors(fault: str) -> Iterator[None]:
    """Turns a store's errors into what clients get: a 503 if a later try may work, else a 500; both say `fault`."""
    try:
        yield
    except StoreUnavailable as error:
        log.error(fault, error=str(error))
        message = f"{fault} now, as their storage cannot be reached; try again"
        raise ApiError(503, message, None, "storage_unavailable", retry_after_s=_RETRY_S) from error
    except (StoreError, SQLAlchemyError, sqlite3.Error) as error:
        log.error(fault, error=first_line(error))
        raise ApiError(500, f"{fault} now; the gateway's log says why", None, "storage_failed") from error
