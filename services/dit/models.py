"""The checkpoint's pipelines as the settings want them, loaded with diffusers' own options, and what has to be switched
between two requests' calls.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import UserCpuOffloadHook
from accelerate.utils.memory import clear_device_cache
from diffusers.hooks.first_block_cache import FirstBlockCacheConfig
from diffusers.hooks.taylorseer_cache import TaylorSeerCacheConfig
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.quantizers.pipe_quant_config import PipelineQuantizationConfig

from services.common.engine.device import Accelerator, engine_device, log_choices
from services.diffusion.families import DENOISERS, TEXT_ENCODERS
from services.diffusion.pipelines import Pipelines, checkpoint_dtype, find_checkpoint, load_meta_modules, without
from services.dit.batching import Arguments
from services.dit.config import DitSettings
from services.dit.coroutine import BatchPoint, ModelCall, install
from services.dit.execution import choices
from services.dit.parallel import resolve_device
from services.dit.parallel_group import Group

_QUANTIZATION: dict[str, tuple[str, dict[str, Any]]] = {
    "bitsandbytes-8bit": ("bitsandbytes_8bit", {"load_in_8bit": True}),
    "bitsandbytes-4bit": ("bitsandbytes_4bit", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "torchao-int8": ("torchao", {"quant_type": "int8wo"}),
    "torchao-float8": ("torchao", {"quant_type": "float8wo"}),
}


class Models(Pipelines):
    """A checkpoint, loaded for denoising. All but the constructor and `watch` is for the engine's thread.

    Args:
        settings: of the stage.
        rank: where several devices share each call, which of them this process has.
        group: the others, of rank 0. It is closed if loading fails.

    Attributes:
        unbatched: why outputs do not share steps; empty if they do.
        denoisers: the models that are called at each step.
        one_at_a_time: whether calling another model takes loading it.

    Raises:
        ValueError: no such checkpoint, a pipeline that is not served, or settings that do not fit it.
        GroupFailed: another device's process could not start.
    """

    def __init__(self, settings: DitSettings, rank: int = 0, group: Group | None = None) -> None:
        self.group = group
        try:
            if settings.parallel_devices > 1:
                settings = settings.model_copy(update={"device": resolve_device(settings, rank)})
            super().__init__(load_pipeline(settings, denoisers_only=rank > 0))
            self.denoisers = _denoisers(self.pipeline)
            if self.group is not None:
                self.group.join(self.denoisers)
        except BaseException:
            self.close()
            raise
        self.unbatched = ""
        self._cached = settings.cache != "none"
        if self._cached:
            self.unbatched = f"cache={settings.cache} keeps results of each output's own earlier steps"
            # the pipelines of the others do not tell a step's calls apart
            self.pipelines = {task: pipe for task, pipe in self.pipelines.items() if supports_caches(pipe)}
        elif settings.context_parallel_ring > 1 and self.family.batching.padded:
            self.unbatched = "prompts of several lengths need a mask, and context_parallel_ring takes none"
        self.one_at_a_time = settings.offload == "model"
        self._loras: tuple[tuple[str, float], ...] | None = None
        self.lora_names = sorted(settings.lora)
        install(self.pipeline)

    def watch(self, tell: Callable[[Exception], object], give_up: Callable[[Exception], object]) -> None:
        """See `Group.watch`."""
        if self.group is not None:
            self.group.watch(tell, give_up)

    def close(self) -> None:
        """Ends the other devices' processes."""
        if self.group is not None:
            self.group.close()

    def run(self, point: BatchPoint, arguments: Arguments, loras: tuple[tuple[str, float], ...]) -> Any:
        """Calls the point's function, a denoiser's on all devices."""
        if self.group is None or point.name not in DENOISERS:
            return point.run(arguments)
        return self.group.run(point.name, arguments, loras, lambda: point.run(arguments))

    @property
    def dtype(self) -> torch.dtype:
        """Of the transformer."""
        return self.denoisers[0].dtype

    @contextlib.contextmanager
    def set_up(
        self, loras: tuple[tuple[str, float], ...], owner: Any = None, call: ModelCall | None = None
    ) -> Iterator[None]:
        """The adapters `loras`, and for `call` the cache of `owner`, while inside."""
        self._use(loras)
        context = call and self._cached and getattr(self._module(call), "cache_context", None)
        if not context:
            yield
            return
        assert call is not None
        assert call.context is not None
        with context.outside(f"{id(owner)}/{call.context.name}", **call.context.arguments):
            yield

    def _module(self, call: ModelCall) -> Any:
        return getattr(self.pipeline, call.point.name, None)

    def _use(self, loras: tuple[tuple[str, float], ...]) -> None:
        if not self.lora_names or loras == self._loras:
            return
        self._loras = None  # unknown, should this fail
        if loras:
            self.pipeline.enable_lora()
            self.pipeline.set_adapters([name for name, _ in loras], [weight for _, weight in loras])
        else:
            self.pipeline.disable_lora()
        self._loras = loras

    def forget(self, owner: Any) -> None:
        """Frees what the caches keep for `owner`."""
        if not self._cached:
            return
        for denoiser in self.denoisers:
            for module in denoiser.modules():
                registry = getattr(module, "_diffusers_hook", None)
                for hook in registry.hooks.values() if registry else ():
                    for state in vars(hook).values():
                        kept = getattr(state, "_state_cache", {})
                        for name in [name for name in kept if name.startswith(f"{id(owner)}/")]:
                            del kept[name]


def load_pipeline(settings: DitSettings, denoisers_only: bool = False) -> DiffusionPipeline:
    """The pipeline that the checkpoint's model_index.json names, ready on its device.

    Args:
        denoisers_only: all other models are without weights.

    Raises:
        ValueError: no such checkpoint, or options that the model or the machine does not have.
    """
    folder = find_checkpoint(settings.model)
    dtype = checkpoint_dtype(folder, settings.dtype)
    device = engine_device(settings.device)
    paths = choices(settings, Accelerator.of(device), str(dtype).removeprefix("torch."))
    if reasons := [choice.reason for choice in paths if choice.fatal]:
        raise ValueError("; ".join(reasons))
    log_choices(paths)
    left_out = TEXT_ENCODERS if denoisers_only or settings.encoders == "stream" else ()
    if denoisers_only:
        left_out = (*left_out, "vae", "image_encoder")
    without_weights = load_meta_modules(folder, dtype, left_out.__contains__)
    options: dict[str, Any] = {"dtype": dtype, **without_weights}
    if settings.quantization in _QUANTIZATION:
        backend, arguments = _QUANTIZATION[settings.quantization]
        denoisers = [name for name in DENOISERS if (folder / name).is_dir()]
        options["quantization_config"] = PipelineQuantizationConfig(backend, arguments, denoisers)
    try:
        pipeline: Any = DiffusionPipeline.from_pretrained(folder, **options)
    except (OSError, ImportError) as error:
        raise ValueError(f"{settings.model}: {error}") from None
    for name in settings.lora:
        _load_lora(pipeline, name, settings.lora[name])
    if settings.cache != "none" and not supports_caches(pipeline):
        raise ValueError(f"cache={settings.cache}: {type(pipeline).__name__} does not support caches; leave it out")
    for denoiser in _denoisers(pipeline):
        _prepare(denoiser, dtype, settings)
    with without(pipeline, without_weights):
        _place(pipeline, device, settings.offload)
    if settings.vae_slicing:
        pipeline.vae.enable_slicing()
    if settings.vae_tiling:
        pipeline.vae.enable_tiling()
    return pipeline


def _denoisers(pipeline: Any) -> list[Any]:
    return [module for name in DENOISERS if (module := getattr(pipeline, name, None)) is not None]


def _load_lora(pipeline: Any, name: str, path: str) -> None:
    if not Path(path).exists():
        raise ValueError(f"lora {name}: {path} does not exist")
    if not hasattr(pipeline, "load_lora_weights"):
        raise ValueError(f"lora {name}: {type(pipeline).__name__} takes no adapters")
    pipeline.load_lora_weights(path, adapter_name=name)


def _prepare(denoiser: Any, dtype: torch.dtype, settings: DitSettings) -> None:
    if settings.attention_backend is not None:
        denoiser.set_attention_backend(settings.attention_backend)
    if settings.quantization == "float8-storage":
        denoiser.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=dtype)
    if settings.cache == "first-block":
        denoiser.enable_cache(FirstBlockCacheConfig(threshold=settings.cache_threshold))
    elif settings.cache == "taylorseer":
        denoiser.enable_cache(TaylorSeerCacheConfig(cache_interval=settings.cache_interval_steps))
    if settings.compile_blocks:
        denoiser.compile_repeated_blocks(dynamic=True)


def _place(pipeline: Any, device: torch.device, offload: str) -> None:
    """Onto the device, or partly, as `offload` says."""
    if offload == "none":
        pipeline.to(device)
    elif offload == "model":
        offload_models(pipeline, device)
    elif offload == "sequential":
        pipeline.enable_sequential_cpu_offload(device=device)
    else:
        pipeline.enable_group_offload(
            onload_device=device,
            offload_type="leaf_level",
            use_stream=device.type == "cuda",
        )


def supports_caches(pipeline: Any) -> bool:
    """Whether the pipeline says which of a step's calls is which: caches keep a state for each."""
    return "cache_context(" in inspect.getsource(type(pipeline).__call__)


def offload_models(pipeline: Any, device: torch.device) -> None:
    """Keeps the models of `pipeline` on the CPU, but for the one that was called last: that is on `device`.

    diffusers' hooks send away the model that stands before the called one in the pipeline's order. That is enough for
    one output after the other. Here a prompt may be read while another output denoises, and two transformers may
    take turns: the model to send away is the one that is there.
    """
    pipeline.enable_model_cpu_offload(device=device)
    place = _Place()
    for hook in pipeline._all_hooks:
        hook.hook.pre_forward = place.takes(hook)


class _Place:
    """On the device, for one model."""

    def __init__(self) -> None:
        self._here: UserCpuOffloadHook | None = None

    def takes(self, hook: UserCpuOffloadHook) -> Callable[..., Any]:
        """What accelerate is to run before a call of the hook's model."""
        bring = hook.hook.pre_forward

        def pre_forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._here is not None and self._here is not hook:
                self._here.offload()
                clear_device_cache()
            self._here = hook  # before it comes: if only a part of it fits, that part is sent away
            return bring(module, *args, **kwargs)

        return pre_forward
