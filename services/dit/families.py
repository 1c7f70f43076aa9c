"""What differs between the families of models: one table."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import diffusers
from diffusers.pipelines.pipeline_utils import DiffusionPipeline

from services.dit.hollow import run_on

Media = Literal["image", "video", "sound"]


def _image_multiple(pipe: Any) -> int:
    """Latents are packed two by two."""
    return pipe.vae_scale_factor * 2


def _patch_multiple(pipe: Any) -> int:
    return pipe.vae_scale_factor * pipe.transformer.config.patch_size


def _glm_multiple(pipe: Any) -> int:
    """Prior tokens are four latents wide."""
    return pipe.vae_scale_factor * pipe.transformer.config.patch_size * 2


def _video_multiple(pipe: Any) -> int:
    transformer = pipe.transformer if pipe.transformer is not None else pipe.transformer_2
    return pipe.vae_scale_factor_spatial * transformer.config.patch_size[1]


def _video_side(pipe: Any) -> int:
    transformer = pipe.transformer if pipe.transformer is not None else pipe.transformer_2
    return transformer.config.rope_max_seq_len * _video_multiple(pipe)


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

    @property
    def result(self) -> str:
        """The field of the pipeline's result that has what it makes."""
        return {"image": "images", "video": "frames", "sound": "audios"}[self.media]


FAMILIES: Mapping[str, Family] = {
    "QwenImagePipeline": Family(
        guidance="true_cfg_scale",
        default_negative=" ",  # without one there is no guidance
        min_steps=2,
        edit="QwenImageImg2ImgPipeline",
        inpaint="QwenImageInpaintPipeline",
    ),
    "QwenImageEditPipeline": Family(
        guidance="true_cfg_scale",
        default_negative=" ",
        images=1,
        needs_image=True,
        inpaint="QwenImageEditInpaintPipeline",
        min_steps=2,
    ),
    "QwenImageEditPlusPipeline": Family(
        guidance="true_cfg_scale", default_negative=" ", images=3, needs_image=True, min_steps=2
    ),
    "ZImagePipeline": Family(
        max_side=lambda pipe: min(pipe.transformer.config.axes_lens[1:]) * _image_multiple(pipe),
        edit="ZImageImg2ImgPipeline",
        inpaint="ZImageInpaintPipeline",
    ),
    "FluxPipeline": Family(
        negative=False, tokenizer="tokenizer_2", edit="FluxImg2ImgPipeline", inpaint="FluxInpaintPipeline"
    ),
    "FluxKontextPipeline": Family(
        negative=False, tokenizer="tokenizer_2", images=1, inpaint="FluxKontextInpaintPipeline"
    ),
    "Flux2Pipeline": Family(negative=False, images=10),
    "Flux2KleinPipeline": Family(negative=False, images=10, inpaint="Flux2KleinInpaintPipeline"),
    "StableDiffusion3Pipeline": Family(
        size_multiple=_patch_multiple,
        max_side=lambda pipe: pipe.transformer.config.pos_embed_max_size * _patch_multiple(pipe),
        tokenizer="tokenizer_3",
        edit="StableDiffusion3Img2ImgPipeline",
        inpaint="StableDiffusion3InpaintPipeline",
    ),
    # no edits: diffusers 0.42 passes the pictures' features to transformers 5.19 in a shape that it does not take
    "GlmImagePipeline": Family(size_multiple=_glm_multiple, negative=False),
    "WanPipeline": Family("video", (832, 480), _video_multiple, _video_side),
    "WanImageToVideoPipeline": Family("video", (832, 480), _video_multiple, _video_side, images=1, needs_image=True),
    "StableAudioPipeline": Family("sound", (0, 0), lambda pipe: 1, max_prompt_tokens=128),
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


def variant(pipeline: DiffusionPipeline, name: str) -> DiffusionPipeline:
    """A pipeline of class `name` with the same models: they are not loaded again, nor kept twice."""
    cls: type[DiffusionPipeline] = getattr(diffusers, name)
    wanted = inspect.signature(cls.__init__).parameters
    made = cls(**{key: value for key, value in pipeline.components.items() if key in wanted})
    if type(pipeline) is not getattr(diffusers, type(pipeline).__name__):  # some models are hollow
        run_on(made, pipeline._execution_device)
    return made
