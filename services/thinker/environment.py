"""Environment variables that vLLM and the hub client read when they are imported, in this process and its children."""

import logging
import multiprocessing
import os
import uuid
from pathlib import Path

import torch

from services.common import logs
from services.thinker import device, flashinfer
from services.thinker.config import ThinkerSettings

_VLLM_LOG_LEVEL = "VLLM_LOGGING_LEVEL"
# vLLM reads it when it is imported: all that it does is to call `spawned_process`.
_LOGGING_CONFIG = Path(__file__).parent / "vllm_logging.json"
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
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # its lines are in no format
        _VLLM_LOG_LEVEL: "DEBUG" if settings.log_level == "debug" else "WARNING",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # vLLM's sockets go to the abstract namespace: a killed process leaves no socket file behind
        "VLLM_RPC_BASE_PATH": f"@quartet-{uuid.uuid4()}",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if os.environ.get("VLLM_CONFIGURE_LOGGING") != "0":
        variables["VLLM_LOGGING_CONFIG_PATH"] = str(_LOGGING_CONFIG)
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
    """Sends this process's log lines, vLLM's among them, to stderr in Quartet's format: after `configure`, before vLLM
    is imported."""
    logs.configure(os.environ[_LOG_LEVEL], "thinker")
    logging.getLogger("vllm").setLevel(os.environ[_VLLM_LOG_LEVEL].upper())


def spawned_process() -> logging.Handler:
    """`configure_logs` for a process that vLLM spawned, as early as it can be had there. Returns a handler, as what the
    logging configuration names must be one."""
    if multiprocessing.parent_process() is not None:
        configure_logs()
    return logging.NullHandler()
