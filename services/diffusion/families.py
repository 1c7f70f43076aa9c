"""What each pipeline class of diffusers makes, and how: found by looking at it, and what a table knows better.

No other file of the two stages names a model.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import diffusers
from diffusers.pipelines.pipeline_utils import DiffusionPipeline

from services.diffusion import beside, found, loaded, modular
from services.diffusion.found import Media
from services.diffusion.modular_index import INDEX, MODULAR_INDEX, is_modular
from services.diffusion.own import OwnPipeline

# Components of the pipelines in the table, by what they do.
TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3", "vision_language_encoder")
DENOISERS = ("transformer", "transformer_2")

_MAX_AUDIO_S = 60.0  # no class says how much it can make
_MAX_READ_TOKENS = 4096  # of a prompt, where a model has room for more than anybody writes: each costs memory


@dataclass(frozen=True)
class BatchRules:
    """How arguments of several calls of one model combine. Others that are tensors or lists with an entry a sample are
    joined if all entries have one shape; anything else must be equal.

    Attributes:
        rows: has an entry for each sample of a call.
        shared: without samples; must be equal, and is passed once.
        alike: an entry a sample, of which the model reads the first: must be equal, and is joined.
        ragged: lists of tensors of any lengths, which the model pads.
        padded: sequence of any length -> its mask; padded at the end.
        expanded: one entry for all samples of the call.
        layers: lists or tuples of tensors that each have an entry a sample, as what a ControlNet makes of its layers.
        layered: whether lists in a result are such, too; otherwise a list has an entry a sample.
        inert: objects that do not matter if this function says so.
        known: all that a call may have; a call with another runs alone. None: any.
    """

    rows: str = "hidden_states"
    shared: frozenset[str] = frozenset()
    alike: frozenset[str] = frozenset()
    ragged: frozenset[str] = frozenset()
    padded: Mapping[str, str] = field(default_factory=dict)
    expanded: frozenset[str] = frozenset()
    layers: frozenset[str] = frozenset()
    layered: bool = False
    inert: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    known: frozenset[str] | None = None


NO_BATCHING = BatchRules(rows="")
"""No argument counts a call's samples: each call runs alone."""


def _usual_size(pipe: Any) -> tuple[int, int]:
    return 1024, 1024  # in the middle of its code


def _image_multiple(pipe: Any) -> int:
    return pipe.vae_scale_factor * 2  # latents are packed two by two


def _patch_multiple(pipe: Any) -> int:
    return pipe.vae_scale_factor * pipe.transformer.config.patch_size


def _glm_multiple(pipe: Any) -> int:
    return _patch_multiple(pipe) * 2  # prior tokens are four latents wide


def _video_config(pipe: Any) -> Any:
    return (pipe.transformer if pipe.transformer is not None else pipe.transformer_2).config


def _video_multiple(pipe: Any) -> int:
    return pipe.vae_scale_factor_spatial * _video_config(pipe).patch_size[1]


def _video_side(pipe: Any) -> int:
    return _video_config(pipe).rope_max_seq_len * _video_multiple(pipe)


def _stable_audio_s(pipe: Any) -> float:
    return pipe.transformer.config.sample_size * pipe.vae.hop_length / pipe.vae.config.sampling_rate


@dataclass(frozen=True)
class Family:
    """One pipeline class of diffusers.

    Attributes:
        listed: whether it is in the table, so that encoders and devices of other processes are known to work.
        media: what it makes.
        result, soundtrack: the fields of the pipeline's result that have it, and its sound; empty: it has none.
        guidance: the argument for `guidance_scale`; empty: there is none.
        frames, seconds: the argument for a video's or sound's length; empty: there is none.
        negative: whether it takes `negative_prompt`.
        images: most pictures it takes itself.
        needs_image, needs_mask: whether a call without one fails.
        stills: whether a video of one frame is an image, made of the prompt alone.
        from_video: whether it takes a video to start from; `needs_video`: whether a call without one fails.
        edit, inpaint, of_video: diffusers' classes for that, with the same components.
        fps: frames a second.
        size: default (width, height) in pixels, by the loaded pipeline; 0: the pipeline's own, which is not known.
        size_multiple: of width and height, in pixels, by the loaded pipeline.
        max_side: most pixels a side, by the loaded pipeline.
        max_prompt_tokens, max_audio_s: by the loaded pipeline.
        scales: whether edits bring a picture to the size that is asked for.
        min_steps: fewer make no picture: Qwen-Image's schedule divides by zero.
    """

    listed: bool
    media: Media
    result: str
    soundtrack: str
    guidance: str
    frames: str
    seconds: str
    negative: bool
    images: int
    needs_image: bool
    needs_mask: bool
    stills: bool
    from_video: bool
    needs_video: bool
    edit: str | None
    inpaint: str | None
    of_video: str | None
    fps: float
    size: Callable[[Any], tuple[int, int]] = loaded.own_size
    size_multiple: Callable[[Any], int] = loaded.size_multiple
    max_side: Callable[[Any], int] = lambda pipe: 1 << 16
    max_prompt_tokens: Callable[[Any], int] = loaded.max_prompt_tokens
    max_audio_s: Callable[[Any], float] = lambda pipe: _MAX_AUDIO_S
    default_negative: str | None = None
    scales: bool = True
    min_steps: int = 1
    batching: BatchRules = NO_BATCHING


def _no_condition_images(kv_caches: Any) -> bool:
    """Whether GLM-Image's cache of an edit's pictures is empty."""
    return all(kv_caches[i].mode is None for i in range(kv_caches.num_layers))


_QWEN: dict[str, Any] = {
    "size_multiple": _image_multiple,
    "default_negative": " ",  # without one there is no guidance
    "min_steps": 2,
    "batching": BatchRules(
        alike=frozenset({"img_shapes"}), padded={"encoder_hidden_states": "encoder_hidden_states_mask"}
    ),
}
_FLUX: dict[str, Any] = {
    "size_multiple": _image_multiple,
    "negative": False,
    "batching": BatchRules(shared=frozenset({"img_ids", "txt_ids"})),
}
_FLUX2: dict[str, Any] = {
    "size_multiple": _image_multiple,
    "images": 10,
    "batching": BatchRules(alike=frozenset({"img_ids", "txt_ids"})),
}


def _grid_side(pipe: Any) -> int:
    """Pixels, of a picture as long as the table of places."""
    return pipe.transformer.sizes.latent_side * _image_multiple(pipe)


_WAN: dict[str, Any] = {"size_multiple": _video_multiple, "max_side": _video_side, "batching": BatchRules()}

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "QwenImagePipeline": _QWEN,
    "QwenImageEditPipeline": _QWEN,
    "QwenImageEditPlusPipeline": _QWEN | {"images": 3},
    "ZImagePipeline": {
        "size": _usual_size,
        "size_multiple": _image_multiple,
        "scales": False,
        "max_side": lambda pipe: min(pipe.transformer.config.axes_lens[1:]) * _image_multiple(pipe),
        "batching": BatchRules(rows="x", ragged=frozenset({"cap_feats"})),
    },
    "FluxPipeline": _FLUX,
    "FluxKontextPipeline": _FLUX,
    "Flux2Pipeline": _FLUX2,
    "Flux2KleinPipeline": _FLUX2,
    "StableDiffusion3Pipeline": {
        "size_multiple": _patch_multiple,
        "max_side": lambda pipe: pipe.transformer.config.pos_embed_max_size * _patch_multiple(pipe),
        "batching": BatchRules(),
    },
    # no edits: diffusers 0.42 passes the pictures' features to transformers 5.19 in a shape that it does not take
    "GlmImagePipeline": {
        "images": 0,
        "size_multiple": _glm_multiple,
        "batching": BatchRules(inert={"kv_caches": _no_condition_images}),
    },
    "WanPipeline": _WAN,
    "WanImageToVideoPipeline": _WAN,
    "StableAudioPipeline": {
        "max_prompt_tokens": lambda pipe: 128,
        "max_audio_s": _stable_audio_s,
        "batching": BatchRules(shared=frozenset({"rotary_embedding"}), expanded=frozenset({"timestep"})),
    },
    "BagelPipeline": {
        "images": 8,  # of a conversation, too: each takes memory while an output is made
        "size": lambda pipe: (_grid_side(pipe),) * 2,
        "size_multiple": _image_multiple,
        "max_side": _grid_side,
        "max_prompt_tokens": lambda pipe: min(_MAX_READ_TOKENS, pipe.transformer.sizes.max_positions // 2),
        "batching": BatchRules(padded={"context": "context_mask"}),
    },
}
"""Pipeline class -> what is not found by looking, or found wrong."""


def family_of(pipeline: type[DiffusionPipeline]) -> Family:
    """What is found of the class, and its row instead. Raises ValueError: requests cannot be made into its calls."""
    name, row = pipeline.__name__, FAMILIES.get(pipeline.__name__)
    if reason := found.why_not(pipeline):
        other = found.sibling(name)
        raise ValueError(
            f"{name} {reason}; served are classes that make images, video or sound from a prompt, with images, a "
            f"mask or a video where they take them{f', such as {other}' if other else ''}"
        )
    result, parameters = found.result_of(pipeline), found.parameters_of(pipeline)
    assert result is not None
    seen = {
        "media": found.RESULTS[result],
        "result": result,
        "soundtrack": found.soundtrack_of(pipeline),
        "guidance": found.guidance_of(pipeline),
        "frames": found.first_of(pipeline, found.FRAMES),
        "seconds": found.first_of(pipeline, found.SECONDS),
        "negative": "negative_prompt" in parameters,
        "images": int(bool(found.picture_of(pipeline))),
        "needs_image": found.needs_picture(pipeline),
        "needs_mask": bool(found.mask_of(pipeline)),
        "stills": beside.makes_stills(pipeline),
        "from_video": bool(found.video_of(pipeline)),
        "needs_video": found.needs_video(pipeline),
        "edit": found.variant(pipeline, "Img2Img"),
        "inpaint": found.variant(pipeline, "Inpaint"),
        "of_video": found.variant(pipeline, "VideoToVideo"),
        "fps": found.frames_per_second(pipeline),
        "scales": row is not None or beside.scales_pictures(pipeline),
    }
    return Family(listed=row is not None, **(seen | dict(row or {})))


OWN: Mapping[str, tuple[str, str]] = {"llm_config.json": ("services.families.bagel.pipeline", "BagelPipeline")}
"""A file of checkpoints without an index of diffusers -> module and name of the class of ours that serves them."""


def own_class(folder: Path) -> type[OwnPipeline] | None:
    """The class of ours that serves a checkpoint; None: diffusers' classes do."""
    if any((folder / index).is_file() for index in (INDEX, MODULAR_INDEX)):
        return None
    found_in = next((OWN[file] for file in OWN if (folder / file).is_file()), None)
    return getattr(import_module(found_in[0]), found_in[1]) if found_in else None


def checkpoint_class(folder: Path) -> type[DiffusionPipeline]:
    """The pipeline class of a checkpoint: the one that its index names. Raises ValueError: diffusers lacks it."""
    if is_modular(folder):
        return modular.pipeline_class(folder)
    if (own := own_class(folder)) is not None:
        return own
    name = json.loads((folder / INDEX).read_text()).get("_class_name")
    cls = getattr(diffusers, name, None) if isinstance(name, str) else None
    if not isinstance(cls, type) or not issubclass(cls, DiffusionPipeline):
        have = f"diffusers {diffusers.__version__} has no such pipeline, or lacks a package for it"
        raise ValueError(f"{INDEX} names {name!r}: {have}; code that comes with a checkpoint is not run")
    return cls
