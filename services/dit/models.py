"""The checkpoint's pipelines, loaded with diffusers' options, and what is switched between two requests' calls."""

import contextlib
import functools
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

from services.common.engine.device import Accelerator, engine_device, log_choices, make_current
from services.diffusion.families import NO_BATCHING, TEXT_ENCODERS, family_of
from services.diffusion.found import control_video_of
from services.diffusion.loaded import denoisers
from services.diffusion.model_info import dit_info
from services.diffusion.nets import load_nets, pipeline_class
from services.diffusion.own import OwnPipeline
from services.diffusion.pipelines import (
    Pipelines,
    checkpoint_dtype,
    denoisers_in,
    find_checkpoint,
    load_meta_modules,
    without,
)
from services.dit.batching import Arguments
from services.dit.config import DitSettings
from services.dit.coroutine import BatchPoint, ModelCall
from services.dit.execution import choices

_QUANTIZATION: dict[str, tuple[str, dict[str, Any]]] = {
    "bitsandbytes-8bit": ("bitsandbytes_8bit", {"load_in_8bit": True}),
    "bitsandbytes-4bit": ("bitsandbytes_4bit", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "torchao-int8": ("torchao", {"quant_type": "int8wo"}),
    "torchao-float8": ("torchao", {"quant_type": "float8wo"}),
}

Loras = tuple[tuple[str, float], ...]
"""(adapter, weight) of those that are on."""


class ModelsLost(Exception):
    """The models can run no call any more."""


class Models(Pipelines):
    """A checkpoint, loaded for denoising. All but the constructor and `watch` is for the engine's thread.

    Args:
        only_denoisers: no other model has weights.

    Attributes:
        denoisers: the models that are called at each step.
        dtype: of the first of them.
        one_at_a_time: whether calling another model takes loading it.
        cached: whether results of an output's earlier steps are kept.

    Raises:
        ValueError: no such checkpoint, a pipeline that is not served, or settings that do not fit it.
    """

    def __init__(self, settings: DitSettings, only_denoisers: bool = False) -> None:
        super().__init__(load_pipeline(settings, only_denoisers))
        self.one_at_a_time = settings.offload == "model"
        self.cached = settings.cache != "none"
        self._loras: Loras | None = None if settings.lora else ()
        if self.cached:  # the pipelines of the others do not tell a step's calls apart
            self.pipelines = {task: pipe for task, pipe in self.pipelines.items() if supports_caches(pipe)}
        self.info = dit_info(self, settings)
        self.info.loras.extend(sorted(settings.lora))
        self.info.needs_source = settings.encoders == "stream"
        self.info.batched = not self.cached
        if self.cached:
            self.info.not_batched = f"cache={settings.cache} keeps results of each output's own earlier steps"
        elif self.family.batching is NO_BATCHING:
            self.info.batched = False
            self.info.not_batched = f"how calls of {self.info.pipeline}'s models are joined is not known"
        self.denoisers: list[Any] = list(denoisers(self.pipeline).values())
        self.dtype: torch.dtype = self.denoisers[0].dtype

    def watch(self, failed: Callable[[Exception], object], give_up: Callable[[Exception], object]) -> None:
        """If the models are lost, `failed` is called at once, and `give_up` if `close` is not called within seconds. In
        any thread."""

    def close(self) -> None:
        """Ends other processes, if there are any."""

    def run(self, point: BatchPoint, arguments: Arguments, loras: Loras) -> Any:
        """Calls the point's function, with the adapters that `set_up` has turned on. May raise ModelsLost."""
        return point.run(arguments)

    @contextlib.contextmanager
    def set_up(self, loras: Loras, owner: Any = None, call: ModelCall | None = None) -> Iterator[None]:
        """Turns on the adapters `loras`, and for `call` the cache of `owner`."""
        self._use(loras)
        if call is not None and call.context is not None and self.cached:
            with call.context(f"{id(owner)}/"):
                yield
        else:
            yield

    def _use(self, loras: Loras) -> None:
        if loras == self._loras:
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
        if not self.cached:
            return
        for module in (module for denoiser in self.denoisers for module in denoiser.modules()):
            registry = getattr(module, "_diffusers_hook", None)
            for hook in registry.hooks.values() if registry else ():
                for state in vars(hook).values():
                    kept = getattr(state, "_state_cache", {})
                    for name in [name for name in kept if name.startswith(f"{id(owner)}/")]:
                        del kept[name]


def load_pipeline(settings: DitSettings, only_denoisers: bool) -> DiffusionPipeline:
    """The checkpoint's pipeline, ready on its device. Raises ValueError, as `Models`."""
    folder = find_checkpoint(settings.model)
    cls = _class_of(folder, settings)
    dtype = checkpoint_dtype(folder, settings.dtype)
    device = engine_device(settings.device)
    make_current(device)  # libraries make streams, and launch kernels, on the current one
    paths = choices(settings, Accelerator.of(device), str(dtype).removeprefix("torch."))
    if reasons := [choice.reason for choice in paths if choice.fatal]:
        raise ValueError("; ".join(reasons))
    log_choices(paths)
    left_out = TEXT_ENCODERS if only_denoisers or settings.encoders == "stream" else ()
    if only_denoisers:
        left_out = (*left_out, "vae", "image_encoder")
    without_weights = load_meta_modules(folder, dtype, left_out)
    options: dict[str, Any] = {"dtype": dtype, **without_weights}
    if settings.quantization in _QUANTIZATION:
        backend, arguments = _QUANTIZATION[settings.quantization]
        options["quantization_config"] = PipelineQuantizationConfig(backend, arguments, denoisers_in(folder))
    if settings.controlnet:
        if len(settings.controlnet) > 1 and control_video_of(cls):
            raise ValueError(f"controlnet: {cls.__name__} is served with one control video: give one net")
        options |= load_nets(cls, settings.controlnet, dtype)
    checked = without_checker(cls)
    if settings.safety_checker == "off":
        if not checked:
            raise ValueError(f"safety_checker=off: {cls.__name__} has none that can be left out; leave it at own")
        options |= checked
    try:
        pipeline: Any = cls.from_pretrained(folder, **options)
    except (OSError, ImportError) as error:
        advice = "; or start it with --safety-checker off" if checked and "safety" in str(error) else ""
        raise ValueError(f"{settings.model}: {str(error).strip().rstrip('.')}{advice}") from None
    for name, path in settings.lora.items():
        if not Path(path).exists():
            raise ValueError(f"lora {name}: {path} does not exist")
        if not hasattr(pipeline, "load_lora_weights"):
            raise ValueError(f"lora {name}: {type(pipeline).__name__} takes no adapters")
        pipeline.load_lora_weights(path, adapter_name=name)
    if settings.cache != "none" and not supports_caches(pipeline):
        raise ValueError(f"cache={settings.cache}: {type(pipeline).__name__} does not support caches; leave it out")
    for denoiser in denoisers(pipeline).values():
        _prepare(denoiser, dtype, settings)
    with without(pipeline, without_weights):
        _place(pipeline, device, settings.offload)
    if settings.vae_decoding != "whole":
        if not hasattr(getattr(pipeline, "vae", None), "enable_slicing"):
            raise ValueError(f"vae_decoding={settings.vae_decoding}: this pipeline's VAE cannot; leave it out")
        pipeline.vae.enable_slicing()
    if settings.vae_decoding == "tiled":
        pipeline.vae.enable_tiling()
    return pipeline


def _class_of(folder: Path, settings: DitSettings) -> type[DiffusionPipeline]:
    """Of the checkpoint, with its ControlNets. Raises ValueError, before weights are loaded: it is not served, or not
    with such settings."""
    cls = pipeline_class(folder, settings.controlnet)
    family = family_of(cls)
    if not denoisers_in(folder):
        raise ValueError(f"{folder.name}: none of its models is called at each denoising step: it is not served")
    if issubclass(cls, OwnPipeline):
        for name, taken in cls.settings.items():
            if (value := getattr(settings, name)) not in taken:
                known = " or ".join(str(each) for each in taken if each is not None) or "the default"
                raise ValueError(f"{name}={value}: {cls.__name__} is served with {known}; leave it out")
    if settings.encoders == "stream" and not family.listed:
        raise ValueError("encoders=stream: how this pipeline's encoders are divided from it is not known; leave it out")
    return cls


def _prepare(denoiser: Any, dtype: torch.dtype, settings: DitSettings) -> None:
    if settings.attention_backend is not None:
        denoiser.set_attention_backend(settings.attention_backend)
    if settings.quantization == "float8-storage":
        denoiser.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=dtype)
    cache, _, degree = settings.cache.partition(":")
    if cache == "first-block":
        denoiser.enable_cache(FirstBlockCacheConfig(threshold=float(degree or 0.05)))
    elif cache == "taylorseer":
        denoiser.enable_cache(TaylorSeerCacheConfig(cache_interval=int(degree or 5)))
    if settings.compile == "on":
        denoiser.compile_repeated_blocks(dynamic=True)


def _place(pipeline: Any, device: torch.device, offload: str) -> None:
    if offload == "none":
        pipeline.to(device)
    elif offload == "model":
        offload_models(pipeline, device)
    elif offload == "sequential":
        pipeline.enable_sequential_cpu_offload(device=device)
    else:
        use_stream = device.type == "cuda"
        pipeline.enable_group_offload(onload_device=device, offload_type="leaf_level", use_stream=use_stream)


def without_checker(cls: type[DiffusionPipeline]) -> dict[str, Any]:
    """Arguments of the class that leave its safety checker out; none: it has no checker, or needs it."""
    taken = inspect.signature(cls.__init__).parameters
    wanted: dict[str, Any] = {"enable_safety_checker": False, "requires_safety_checker": False}
    given = {name: value for name, value in wanted.items() if name in taken}
    return given | ({"safety_checker": None} if given and "safety_checker" in taken else {})


def supports_caches(pipeline: Any) -> bool:
    """Whether the pipeline tells a step's calls apart, as caches need."""
    return "cache_context(" in inspect.getsource(type(pipeline).__call__)


def offload_models(pipeline: Any, device: torch.device) -> None:
    """Keeps the models of `pipeline` on the CPU, but for the one that was called last: that is on `device`.

    diffusers' hooks send away the model before the called one in the pipeline's order. Here outputs call models in any
    order.
    """
    pipeline.enable_model_cpu_offload(device=device)
    here: UserCpuOffloadHook | None = None

    def take_place(hook: UserCpuOffloadHook, bring: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal here
        if here is not None and here is not hook:
            here.offload()
            clear_device_cache()
        here = hook  # before it comes: if only a part of it fits, that part is sent away
        return bring(*args, **kwargs)

    for hook in pipeline._all_hooks:
        hook.hook.pre_forward = functools.partial(take_place, hook, hook.hook.pre_forward)
