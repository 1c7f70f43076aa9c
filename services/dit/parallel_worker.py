"""A process of a group other than the first: holds the denoisers and repeats each call of rank 0.

Messages of its pipe: it says None when it has loaded, when it has joined the group and after each call, or what went
wrong; rank 0 sends calls (`parallel_wire`), and None to end it.
"""

import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import distributed

from services.common.engine.process import end_with_parent
from services.common.telemetry import logs
from services.dit import parallel_wire
from services.dit.config import DitSettings
from services.dit.models import Models
from services.dit.parallel import join, resolve_device

log = structlog.get_logger()


def work(rank: int, values: dict[str, Any], store: Path, connection: Connection) -> None:
    """Entry point of the process.

    Args:
        rank: of the group, from 1.
        values: of the settings.
        store: see `parallel.join`.
        connection: this end of the pipe.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 gets them too, drains, and then ends this process
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(store.parent)
    settings = DitSettings(**values)
    logs.configure(settings.log_level, f"dit-{rank}")
    device = torch.device(resolve_device(settings, rank))
    if settings.threads:
        torch.set_num_threads(settings.threads)
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        models = Models(settings, rank)
        connection.send(None)
        join(settings, rank, store, models.denoisers)
    except Exception as error:
        log.exception("a worker could not start", rank=rank)
        connection.send(repr(error))
        return
    connection.send(None)
    with torch.no_grad():
        while (message := connection.recv()) is not None:
            connection.send(_repeat(models, message, device))
    distributed.destroy_process_group()


def _repeat(models: Models, message: Any, device: torch.device) -> str | None:
    """Makes a call of rank 0. The result is rank 0's; here only what went wrong is of interest."""
    try:
        name, arguments, loras = parallel_wire.receive(message, device)
        with models.set_up(loras):
            getattr(models.pipeline, name).forward(**arguments)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:
        return repr(error)
    return None
