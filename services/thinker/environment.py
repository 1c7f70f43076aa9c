"""Environment variables that vLLM and the hub client read when they are imported, in this process and its children."""

import logging
import os
import uuid
from pathlib import Path

import torch

from services.common.telemetry import logs
from services.thinker import device, flashinfer
from services.thinker.config import ThinkerSettings

_VLLM_LOG_LEVEL = "VLLM_LOGGING_LEVEL"
_LOG_LEVEL = "QUARTET_THINKER_LOG_LEVEL"


def configure(settings: ThinkerSettings) -> None:
    """Call before vLLM or transformers is imported. What the operator set stays as it is.

    Raises:
        ValueError: vLLM cannot run on the device that `settings` name.
    """
    visible = device.visible_devices(
        settings.device,
        settings.tensor_parallel_size,
        for_cpus=device.vllm_is_for_cpus(),
        cuda_devices=torch.cuda.device_count(),  # by NVML: CUDA, which reads the variable once, stays untouched
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    os.environ[_LOG_LEVEL] = settings.log_level  # for vLLM's processes, which are not given the flags
    for name, value in defaults(settings).items():
        os.environ.setdefault(name, value)


def defaults(settings: ThinkerSettings) -> dict[str, str]:
    """Variables that an operator may set otherwise."""
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CONFIGURE_LOGGING": "0",  # configure_logs does it
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # its lines are in no format
        _VLLM_LOG_LEVEL: "DEBUG" if settings.log_level == "debug" else "WARNING",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # vLLM's sockets go to the abstract namespace: a killed process leaves no socket file behind
        "VLLM_RPC_BASE_PATH": f"@quartet-{uuid.uuid4()}",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if flashinfer.missing():
        # vLLM's sampler would compile FlashInfer's kernels when they are first used, and die where it cannot
        variables[flashinfer.SAMPLER_VARIABLE] = "0"
    if settings.enforce_eager is not False and device.vllm_is_for_cpus():
        # vLLM's sampler compiles a few small functions when they are first used, which stops a CPU for 15 s
        variables["TORCHDYNAMO_DISABLE"] = "1"
    if Path(settings.model).is_dir():
        variables["HF_HUB_OFFLINE"] = "1"
    return variables


def configure_logs() -> None:
    """Sends this process's log lines, vLLM's among them, to stderr in Quartet's format: after `configure`, in the
    thinker's process and in those that vLLM spawns, before vLLM is imported."""
    logs.configure(os.environ[_LOG_LEVEL], "thinker")
    logging.getLogger("vllm").setLevel(os.environ[_VLLM_LOG_LEVEL].upper())
