"""What differs between the families of diffusion models: one table.

No other file of the diffusion stage or of its encoder names a model.
"""

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
    """How arguments of several calls of one model combine. Those not named: tensors and lists with an entry a sample
    are joined where all entries have one shape; anything else must be equal.

    Attributes:
        rows: the argument that says how many samples a call has.
        shared: without samples; must be equal, and is passed once.
        alike: an entry a sample, but the model looks at the first only: must be equal, and is joined.
        ragged: lists of tensors of any lengths; the model itself pads them.
        padded: sequence -> its mask. Of any lengths: padded at the end and masked here.
        expanded: one entry that stands for all samples of the call.
        inert: objects of one request that do not matter while this says so of them.
    """

    rows: str = "hidden_states"
    shared: frozenset[str] = frozenset()
    alike: frozenset[str] = frozenset()
    ragged: frozenset[str] = frozenset()
    padded: Mapping[str, str] = field(default_factory=dict)
    expanded: frozenset[str] = frozenset()
    inert: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)


def _image_multiple(pipe: Any) -> int:
    """Latents are packed two by two."""
    return pipe.vae_scale_factor * 2


def _patch_multiple(pipe: Any) -> int:
    return pipe.vae_scale_factor * pipe.transformer.config.patch_size


def _glm_multiple(pipe: Any) -> int:
    """Prior tokens are four latents wide."""
    return pipe.vae_scale_factor * pipe.transformer.config.patch_size * 2


def _video_config(pipe: Any) -> Any:
    """Of the transformer."""
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
        size: (width, height) in pixels where neither request nor settings give one.
        size_multiple: of width and height, in pixels; of the loaded pipeline.
        max_side: most pixels a side that the loaded transformer has positions for.
        guidance: the argument that `guidance_scale` of a request goes to.
        negative: whether it takes `negative_prompt`, and `default_negative` the one it gets where a request has none.
        tokenizer: the component that says how long a prompt is, and `max_prompt_tokens` the most where the pipeline
            has no `max_sequence_length`.
        images: most pictures it takes itself; `needs_image`: and at least one.
        edit, inpaint: classes of diffusers that do that with the same components.
        min_steps: fewer make no picture: Qwen-Image's schedule divides by zero.
        fps: frames a second.
        batching: how several requests' calls of its transformer become one.
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
    min_steps: int = 1
    fps: float = 16.0
    batching: BatchRules = field(default_factory=BatchRules)

    @property
    def result(self) -> str:
        """The field of the pipeline's result that has what it makes."""
        return {"image": "images", "video": "frames", "sound": "audios"}[self.media]


def _no_condition_images(kv_caches: Any) -> bool:
    """GLM-Image keeps keys and values of an edit's pictures in it; without pictures it stays empty."""
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
    """The table's entry.

    Raises:
        ValueError: the class is not in the table.
    """
    name = type(pipeline).__name__
    if name not in FAMILIES:
        raise ValueError(f"{name} is not served; checkpoints of these pipelines are: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def default_of(pipeline: type[DiffusionPipeline], argument: str) -> Any:
    """Default of an argument of the pipeline's call; None if it has none."""
    parameter = inspect.signature(pipeline.__call__).parameters.get(argument)
    return None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default
