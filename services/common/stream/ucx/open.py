"""A stage's UCX worker, if it is to have one and can."""

import structlog

from services.common.rpc.settings import StageSettings
from services.common.stream.ucx.worker import Worker

log = structlog.get_logger()


def open_worker(settings: StageSettings) -> Worker | None:
    """The worker of a process with `settings`. None, with a logged line, if there can be none."""
    if "ucx" not in settings.transports:
        return None
    try:
        return Worker()
    except (ImportError, OSError) as error:
        log.warning("no UCX: tensors go inline; pip install 'quartet[ucx]'", reason=str(error))
        return None
