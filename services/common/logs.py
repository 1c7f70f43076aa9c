"""Structured logs: one JSON object a line on stderr, or coloured text on a terminal."""

import logging
import sys

import structlog


def configure(level: str, stage: str) -> None:
    """Sends structlog and the standard library's records to stderr in one format, each naming its `stage`.

    Args:
        level: least level logged, "debug" to "error".
        stage: name of this process's stage.
    """
    shared: list[structlog.typing.Processor] = [
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
    structlog.contextvars.bind_contextvars(stage=stage)
