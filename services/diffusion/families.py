"""The table of the families of diffusion models. No other file of the two stages names a model."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from diffusers.pipelines.pipeline_utils import DiffusionPipeline

Media = Literal["image", "video", "sound"]

# Components of pipelines, by what they do.
TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3", "vision_language_encoder")
DENOISERS = ("transformer", "transformer_2")


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
        inert: objects that do not matter if this function says so.
    """

    rows: str = "hidden_states"
    shared: frozenset[str] = frozenset()
    alike: frozenset[str] = frozenset()
    ragged: frozenset[str] = frozenset()
    padded: Mapping[str, str] = field(default_factory=dict)
    expanded: frozenset[str] = frozenset()
    inert: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)


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


@dataclass(frozen=True)
class Family:
    """One pipeline class of diffusers.

    Attributes:
        media: what it makes.
        size: default (width, height) in pixels.
        size_multiple: of width and height, in pixels, by the loaded pipeline.
        max_side: most pixels a side, by the loaded pipeline.
        guidance: the argument for `guidance_scale`.
        negative: whether it takes `negative_prompt`.
        tokenizer: the component that counts a prompt's tokens.
        max_prompt_tokens: where the pipeline has no `max_sequence_length`.
        images: most pictures it takes itself.
        edit, inpaint: diffusers' classes for that, with the same components.
        scales: whether they bring a picture to the size that is asked for.
        min_steps: fewer make no picture: Qwen-Image's schedule divides by zero.
        fps: frames a second.
    """

    media: Media = "image"
    size: tuple[int, int] = (1024, 1024)
    size_multiple: Callable[[Any], int] = _image_multiple
    max_side: Callable[[Any], int] = lambda pipe: 1 << 16
    guidance: str = "guidance_scale"
    negative: bool = True
    default_negative: str | None = None
    tokenizer: str = "tokenizer"
    max_prompt_tokens: int = 0
    images: int = 0
    needs_image: bool = False
    edit: str | None = None
    inpaint: str | None = None
    scales: bool = True
    min_steps: int = 1
    fps: float = 16.0
    batching: BatchRules = field(default_factory=BatchRules)

    @property
    def result(self) -> str:
        """The field of the pipeline's result."""
        return {"image": "images", "video": "frames", "sound": "audios"}[self.media]


def _no_condition_images(kv_caches: Any) -> bool:
    """Whether GLM-Image's cache of an edit's pictures is empty."""
    return all(kv_caches[i].mode is None for i in range(kv_caches.num_layers))


_QWEN = Family(
    guidance="true_cfg_scale",
    default_negative=" ",  # without one there is no guidance
    min_steps=2,
    batching=BatchRules(
        alike=frozenset({"img_shapes"}), padded={"encoder_hidden_states": "encoder_hidden_states_mask"}
    ),
)
_FLUX = Family(negative=False, tokenizer="tokenizer_2", batching=BatchRules(shared=frozenset({"img_ids", "txt_ids"})))
_FLUX2 = Family(negative=False, images=10, batching=BatchRules(alike=frozenset({"img_ids", "txt_ids"})))
_WAN = Family("video", (832, 480), _video_multiple, _video_side)

FAMILIES: Mapping[str, Family] = {
    "QwenImagePipeline": replace(_QWEN, edit="QwenImageImg2ImgPipeline", inpaint="QwenImageInpaintPipeline"),
    "QwenImageEditPipeline": replace(_QWEN, images=1, needs_image=True, inpaint="QwenImageEditInpaintPipeline"),
    "QwenImageEditPlusPipeline": replace(_QWEN, images=3, needs_image=True),
    "ZImagePipeline": Family(
        max_side=lambda pipe: min(pipe.transformer.config.axes_lens[1:]) * _image_multiple(pipe),
        edit="ZImageImg2ImgPipeline",
        inpaint="ZImageInpaintPipeline",
        scales=False,
        batching=BatchRules(rows="x", ragged=frozenset({"cap_feats"})),
    ),
    "FluxPipeline": replace(_FLUX, edit="FluxImg2ImgPipeline", inpaint="FluxInpaintPipeline"),
    "FluxKontextPipeline": replace(_FLUX, images=1, inpaint="FluxKontextInpaintPipeline"),
    "Flux2Pipeline": _FLUX2,
    "Flux2KleinPipeline": replace(_FLUX2, inpaint="Flux2KleinInpaintPipeline"),
    "StableDiffusion3Pipeline": Family(
        size_multiple=_patch_multiple,
        max_side=lambda pipe: pipe.transformer.config.pos_embed_max_size * _patch_multiple(pipe),
        tokenizer="tokenizer_3",
        edit="StableDiffusion3Img2ImgPipeline",
        inpaint="StableDiffusion3InpaintPipeline",
    ),
    # no edits: diffusers 0.42 passes the pictures' features to transformers 5.19 in a shape that it does not take
    "GlmImagePipeline": Family(
        size_multiple=_glm_multiple, negative=False, batching=BatchRules(inert={"kv_caches": _no_condition_images})
    ),
    "WanPipeline": _WAN,
    "WanImageToVideoPipeline": replace(_WAN, images=1, needs_image=True),
    "StableAudioPipeline": Family(
        "sound",
        (0, 0),
        lambda pipe: 1,
        max_prompt_tokens=128,
        batching=BatchRules(shared=frozenset({"rotary_embedding"}), expanded=frozenset({"timestep"})),
    ),
}


def family_of(pipeline: DiffusionPipeline) -> Family:
    """The pipeline's entry. Raises ValueError: it has none."""
    name = type(pipeline).__name__
    if name not in FAMILIES:
        raise ValueError(f"{name} is not served; checkpoints of these pipelines are: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def default_of(pipeline: type[DiffusionPipeline], argument: str) -> Any:
    """Default of an argument of the pipeline's call; None if it has none."""
    parameter = inspect.signature(pipeline.__call__).parameters.get(argument)
    return None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default
