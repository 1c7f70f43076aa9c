"""Loads a diffusers checkpoint with diffusers' own options: dtype, quantization, offloading, caches, adapters."""

import inspect
from pathlib import Path
from typing import Any

import structlog
import torch
from diffusers.hooks.first_block_cache import FirstBlockCacheConfig
from diffusers.hooks.taylorseer_cache import TaylorSeerCacheConfig
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.quantizers.pipe_quant_config import PipelineQuantizationConfig
from safetensors import safe_open

from services.common.engine.device import engine_device
from services.common.engine.execution import Accelerator, log_choices
from services.dit.config import DitSettings
from services.dit.execution import choices
from services.dit.hollow import ENCODERS, OTHERS, hollow_models, without
from services.dit.offload import offload_models
from services.dit.weave import DENOISERS

_QUANTIZATION: dict[str, tuple[str, dict[str, Any]]] = {
    "bitsandbytes-8bit": ("bitsandbytes_8bit", {"load_in_8bit": True}),
    "bitsandbytes-4bit": ("bitsandbytes_4bit", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "torchao-int8": ("torchao", {"quant_type": "int8wo"}),
    "torchao-float8": ("torchao", {"quant_type": "float8wo"}),
}

log = structlog.get_logger()


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
    left_out = (*ENCODERS, *OTHERS) if denoisers_only else ENCODERS if settings.encoders == "stream" else ()
    hollow = hollow_models(folder, dtype, left_out.__contains__)
    options: dict[str, Any] = {"dtype": dtype, **hollow}
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
    denoisers = [module for name in DENOISERS if (module := getattr(pipeline, name, None)) is not None]
    if settings.cache != "none" and not supports_caches(pipeline):
        raise ValueError(f"cache={settings.cache}: {type(pipeline).__name__} does not support caches; leave it out")
    for denoiser in denoisers:
        _prepare(denoiser, dtype, settings)
    with without(pipeline, hollow):
        _place(pipeline, device, settings.offload)
    if settings.vae_slicing:
        pipeline.vae.enable_slicing()
    if settings.vae_tiling:
        pipeline.vae.enable_tiling()
    return pipeline


def find_checkpoint(model: str) -> Path:
    """The checkpoint's directory on this machine, fetched if need be.

    Raises:
        ValueError: there is no such diffusers checkpoint.
    """
    if Path(model).is_dir():
        if not (Path(model) / "model_index.json").is_file():
            raise ValueError(f"{model} has no model_index.json: it is no diffusers checkpoint")
        return Path(model)
    try:
        return Path(DiffusionPipeline.download(model))
    except (OSError, ValueError) as error:
        raise ValueError(f"{model} is neither a directory nor a diffusers model on the hub: {error}") from None


def checkpoint_dtype(folder: Path, asked: str) -> torch.dtype:
    """`asked`, or what the transformer's weights are stored in."""
    if asked != "auto":
        return getattr(torch, asked)
    files = [file for name in DENOISERS for file in sorted((folder / name).glob("*.safetensors"))]
    if not files:
        return torch.float32
    with safe_open(files[0], framework="pt") as weights:
        return weights.get_slice(next(iter(weights.keys())))[:1].dtype


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
