"""Structured logs on stderr: one JSON object a line, or coloured text on a terminal."""

import logging
import sys
from types import TracebackType

import structlog


def configure(level: str, stage: str) -> None:
    """Logs structlog's and the standard library's records, warnings, and the error that ends this process in one format
    with its `stage`, from `level` ("debug" to "error") on."""

    def add_stage(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event.setdefault("stage", stage)
        return event

    shared: list[structlog.typing.Processor] = [
        add_stage,  # not a context variable, which a new thread lacks
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    on_terminal = sys.stderr.isatty()
    renderer = structlog.dev.ConsoleRenderer() if on_terminal else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    final = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if not on_terminal:
        final.append(structlog.processors.format_exc_info)  # type: ignore[arg-type]
    handler = logging.StreamHandler()
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[*final, renderer]))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.captureWarnings(True)
    if not on_terminal:
        sys.excepthook = _log_uncaught


def adopt(library: str) -> None:
    """Takes over the records of an imported `library` that gave its logger handlers."""
    logger = logging.getLogger(library)
    logger.handlers.clear()
    logger.propagate = True


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
    else:
        logging.getLogger().critical("ended by an error", exc_info=(kind, error, traceback))
