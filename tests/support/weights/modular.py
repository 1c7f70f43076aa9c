"""Small random checkpoints of diffusers' modular pipelines: the components are those of pipeline classes."""

# diffusers exports its classes lazily, which pyright does not take for an export:
# pyright: reportPrivateImportUsage=false, reportArgumentType=false

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

import cli.tiny
from cli.tiny import FAMILIES, parts
from cli.tiny.weights import _randomize, randomize_pipeline
from tests.support.kept import kept_folder
from tests.support.weights import unlisted

SIZE = parts.SIZES["tiny"]


def _drawn(build: Callable[[], Any]) -> Mapping[str, Any]:
    """Components of a pipeline class."""
    made = build().components
    for model in made.values():
        if isinstance(model, torch.nn.Module):
            _randomize(model.eval())
    return made


def _of_family(arch: str) -> Mapping[str, Any]:
    """Components of a pipeline that `quartet tiny` makes."""
    build = getattr(import_module(f"cli.tiny.{FAMILIES[arch]}"), arch.replace("-", "_"))
    pipeline = build(SIZE)
    randomize_pipeline(pipeline)
    return pipeline.components


def _music() -> Mapping[str, Any]:
    """A language model that writes sound tokens, whose ids are those of the published vocabulary."""
    config = transformers.Qwen3Config(**parts.language_sizes(168_064, (16, 1, 2)), head_dim=8, tie_word_embeddings=True)
    made = {
        "language_model": transformers.Qwen3ForCausalLM(config),
        "rvq_depth_decoder": diffusers.MiniMaxMusic3RVQDepthDecoder(
            hidden_size=16, num_layers=1, num_attention_heads=2, intermediate_size=32
        ),
        "condition_encoder": diffusers.MiniMaxMusic3ConditionEncoder(condition_hidden_dim=16, out_dim=8),
        "transformer": diffusers.MiniMaxMusic3Transformer1DModel(
            in_channels=8,
            condition_dim=8,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=8,
            ff_inner_dim=16,
            rotary_dim=4,
            fourier_embedding_dim=8,
        ),
        "vocoder": diffusers.MiniMaxMusic3Vocoder(latent_channels=8, decoder_input_dim=8, decoder_hidden_dim=16),
    }
    for model in made.values():
        _randomize(model.eval())
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    return {**made, "tokenizer": parts.qwen_tokenizer(SIZE.words), "scheduler": scheduler}


MADE: Mapping[str, Callable[[], Mapping[str, Any]]] = {
    "StableDiffusionXLModularPipeline": lambda: _drawn(unlisted.stable_diffusion_xl),
    "StableDiffusion3ModularPipeline": lambda: _of_family("sd3"),
    "FluxModularPipeline": lambda: _of_family("flux"),
    "Flux2KleinBaseModularPipeline": lambda: _of_family("flux2-klein"),
    "ZImageModularPipeline": lambda: _of_family("z-image"),
    "QwenImageModularPipeline": lambda: _of_family("qwen-image"),
    "QwenImageEditPlusModularPipeline": lambda: _of_family("qwen-image-edit"),
    "LTXModularPipeline": lambda: _drawn(unlisted.ltx),
    "LTX2ModularPipeline": lambda: _drawn(unlisted.ltx2),
    "MiniMaxMusic3ModularPipeline": _music,
    "Wan22ModularPipeline": lambda: _of_family("wan"),
    "Wan22Image2VideoModularPipeline": lambda: _of_family("wan-i2v"),
}
"""Modular class -> its components."""


def modular_checkpoint(name: str, **changes: Any) -> Path:
    """Of a modular class in `MADE`. `changes`: configs of the pipeline, or components."""

    def make(out: Path) -> None:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            save(name, dict(MADE[name]()) | changes, out)

    sources = Path(__file__), Path(unlisted.__file__), Path(cli.tiny.__file__).parent
    return kept_folder(make, "modular", name, repr(changes), *sources)


def save(name: str, components: Mapping[str, Any], out: Path) -> None:
    """Writes a checkpoint of the class `name`, of those `components` that its blocks know."""
    cls = getattr(diffusers, name)
    pipeline = cls(getattr(diffusers, cls.default_blocks_name)())
    known = {*pipeline._component_specs, *pipeline._config_specs}
    given = {part: value for part, value in components.items() if part in known and value is not None}
    pipeline.update_components(**given)
    pipeline.save_pretrained(str(out), overwrite_modular_index=True)
