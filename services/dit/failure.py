"""What a requester is told when a pipeline raises."""

import structlog
import torch

from services.common.rpc.errors import InternalError, InvalidInput, QueueFull, StageError

log = structlog.get_logger()


def explain(error: Exception) -> StageError:
    """The error as a requester gets it; what a person has to look into is logged."""
    if isinstance(error, StageError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return QueueFull(
            "the device has not enough memory for this size now; retry later or ask for a smaller one", 5.0
        )
    log.error("a pipeline failed", exc_info=error)
    if isinstance(error, ValueError):  # how pipelines refuse arguments that we took for good
        return InvalidInput("request", str(error))
    return InternalError("the pipeline failed; the stage's log has the details")


def breaks_the_device(error: Exception) -> bool:
    """Whether nothing can run on the device any more, as after an index out of bounds in a CUDA kernel."""
    return isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError)
