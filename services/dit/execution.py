"""Which paths the diffusion stage's computations take."""

from services.common.engine.device import Accelerator, Choice
from services.dit.config import DitSettings

_AMPERE = (8, 0)


def choices(settings: DitSettings, accelerator: Accelerator | None, dtype: str) -> tuple[Choice, ...]:
    """What this stage does.

    Args:
        accelerator: None: the CPU.
        dtype: of the weights, e.g. "bfloat16".
    """
    return (
        _weights(settings, accelerator, dtype),
        _attention(settings.attention_backend, accelerator),
        _blocks(settings),
        _offload(settings.offload, accelerator),
        _steps(settings),
        devices(settings, accelerator),
    )


def _weights(settings: DitSettings, accelerator: Accelerator | None, dtype: str) -> Choice:
    path = dtype if settings.quantization == "none" else f"{dtype}, {settings.quantization}"
    if accelerator is not None and dtype == "bfloat16" and accelerator.capability < _AMPERE:
        return Choice("weights", path, f"{accelerator.architecture} has no bfloat16 units: slow; give --dtype=float16")
    return Choice("weights", path, "the checkpoint's" if settings.dtype == "auto" else "as --dtype says")


def _attention(requested: str | None, accelerator: Accelerator | None) -> Choice:
    if requested is None:
        return Choice("attention", "native", "diffusers' default: torch's own attention, which picks its kernel")
    kernels = requested.lower().lstrip("_")
    needs = ""
    if accelerator is None and kernels.startswith(("flash", "sage")):
        needs = "a GPU"
    elif accelerator is not None and kernels.startswith("flash") and accelerator.capability < _AMPERE:
        needs = f"sm_80 or newer, this is {accelerator.architecture}"
    reason = f"--attention-backend={requested} needs {needs}; leave it out" if needs else "as --attention-backend says"
    return Choice("attention", requested, reason, fatal=bool(needs))


def _blocks(settings: DitSettings) -> Choice:
    if settings.compile == "on":
        return Choice("blocks", "compiled", "as --compile=on says: minutes at the start")
    return Choice("blocks", "eager", "every output is diffusers' own; --compile=on compiles them")


def _offload(offload: str, accelerator: Accelerator | None) -> Choice:
    if offload == "none":
        return Choice("models", "all on the device", "--offload=model keeps one there at a time, for less memory")
    if accelerator is None:
        reason = f"offload={offload} keeps models off the device; the device is the CPU itself: leave it out"
        return Choice("models", f"offload {offload}", reason, fatal=True)
    return Choice("models", f"offload {offload}", f"as --offload={offload} says")


def _steps(settings: DitSettings) -> Choice:
    if settings.cache != "none":
        return Choice("steps", "one output each", f"cache={settings.cache} keeps results of an output's own steps")
    return Choice("steps", f"up to {settings.max_batch} outputs", "those of one shape share a step (--max-batch)")


def devices(settings: DitSettings, accelerator: Accelerator | None) -> Choice:
    """How many devices share each denoising call; see `choices`."""
    if settings.parallel_devices == 1:
        return Choice("devices", "1", "--context-parallel shares a call among several")
    degrees = settings.context_parallel
    path = f"{settings.parallel_devices}: ulysses {degrees.get('ulysses', 1)} x ring {degrees.get('ring', 1)}"
    for name, off in (("cache", "none"), ("compile", "off"), ("offload", "none")):
        if (value := getattr(settings, name)) != off:
            reason = f"{settings.parallelism}: not together with {name}={value}; leave one of them out"
            return Choice("devices", path, reason, fatal=True)
    if accelerator is None and degrees.get("ring", 1) > 1:
        reason = f"{settings.parallelism}: no attention backend can make a ring of CPUs"
        return Choice("devices", path, reason, fatal=True)
    return Choice("devices", path, f"as {settings.parallelism} says")
