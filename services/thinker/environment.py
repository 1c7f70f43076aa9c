"""Environment variables that vLLM and the hub client read when they are imported, in this process and its children."""

import atexit
import os
import shutil
import tempfile
import uuid
from pathlib import Path

import torch

from services.thinker import device, flashinfer
from services.thinker.config import ThinkerSettings
from services.thinker.plugin import SCRATCH_DIR


def configure(settings: ThinkerSettings) -> None:
    """Call before vLLM or transformers is imported. What the operator set stays as it is.

    Raises:
        ValueError: vLLM cannot run on the device that `settings` name.
    """
    for_cpus = device.vllm_is_for_cpus()
    visible = device.visible_devices(
        settings.device,
        settings.tensor_parallel_size,
        for_cpus=for_cpus,
        cuda_devices=torch.cuda.device_count(),  # by NVML: CUDA, which reads the variable once, stays untouched
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "DEBUG" if settings.log_level == "debug" else "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # vLLM's sockets go to the abstract namespace: a killed process leaves no socket file behind
        "VLLM_RPC_BASE_PATH": f"@quartet-{uuid.uuid4()}",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if flashinfer.missing():
        # vLLM's sampler would compile FlashInfer's kernels when they are first used, and die where it cannot
        defaults |= {flashinfer.SAMPLER_VARIABLE: "0"}
    if settings.enforce_eager is not False and for_cpus:
        # vLLM's sampler compiles a few small functions when they are first used, which stops a CPU for 15 s
        defaults |= {"TORCHDYNAMO_DISABLE": "1"}
    if Path(settings.model).is_dir():
        defaults |= {"HF_HUB_OFFLINE": "1"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    _use_scratch_dir()


def _use_scratch_dir() -> None:
    """Gives this process and its children a directory for temporary files, which goes when this process does: vLLM
    leaves its rendezvous files behind when it is killed. The plugin removes it where this process cannot."""
    scratch_dir = tempfile.mkdtemp(prefix="quartet-thinker-")
    atexit.register(shutil.rmtree, scratch_dir, ignore_errors=True)
    os.environ["TMPDIR"] = os.environ[SCRATCH_DIR] = scratch_dir
    tempfile.tempdir = scratch_dir
