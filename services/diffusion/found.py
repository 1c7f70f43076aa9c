"""What a pipeline class of diffusers says of itself: its call's signature, its output class, its models and checks."""

import inspect
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal

import diffusers
import torch
from diffusers.pipelines import pipeline_utils
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from transformers import PreTrainedTokenizerBase

Media = Literal["image", "video", "sound"]

RESULTS: Mapping[str, Media] = {
    "images": "image",
    "image": "image",
    "frames": "video",
    "videos": "video",
    "video": "video",
    "audios": "sound",
}
"""Field of a pipeline's output -> what it is."""
_SOUNDTRACKS = ("audio", "sound")  # fields beside a video, (batch, channels, samples) or (channels, samples)

GUIDANCE = ("guidance_scale", "true_cfg_scale", "prior_guidance_scale")
FRAMES = ("num_frames", "video_length", "frames")
SECONDS = ("audio_end_in_s", "audio_length_in_s", "audio_duration", "audio_duration_s", "duration")
RATES = ("frame_rate", "fps")  # arguments for the frames a second of a video
_TIMES = re.compile(r"^t$|(^|_)timesteps?(_ratio)?$")
NETS = ("controlnet", "adapter")  # components that read control images
_CONTROL_VIDEOS = ("control_video", "conditioning_frames")
LABELS = "class_labels"  # the argument for numbers of classes
_CLASSES = ("num_embeds_ada_norm", "num_class_embeds")  # of a config: how many there are
# Arguments without which calls fail.
_NOT_BROUGHT = ("original_image", "mask_video", "pose_video", "controlnet_frame_indices")
_STARTS_FROM_A_PICTURE = re.compile(
    r"ImageToVideo|Image2Video|(Img|Depth)2Img|Inpaint|(?<!T)I2V|I2I|Edit|Pix2Pix|Upscale|SuperResolution|Refiner|VideoToWorld"
)
_STARTS_FROM_A_VIDEO = re.compile(r"VideoToVideo|V2V")
_STARTS_FROM_ELSE = re.compile(r"VideoToVideo|V2V|VACE|AudioToAudio")
_CONTINUE = ("image", "overlap_history")  # arguments of calls that continue a video
_OF_REQUESTS = ("prompt", "image", "mask_image", "control_image", "control_mask", "video", "height", "width")
_REQUESTS_BRING = {*_OF_REQUESTS, *_CONTROL_VIDEOS, LABELS, "num_inference_steps", "generator"}
_LEAST_TOKENS_OF_NO_LIMIT = 1 << 20  # tokenizers without a limit state a huge one
_MULTIPLES = (1, 2, 4, 8, 16)

Parameters = Mapping[str, inspect.Parameter]


@cache
def parameters_of(cls: type) -> Parameters:
    """Arguments of the pipeline's call."""
    return {name: each for name, each in inspect.signature(cls.__call__).parameters.items() if name != "self"}


def default_of(pipeline: type[DiffusionPipeline], argument: str) -> Any:
    """Default of an argument of the pipeline's call; None if it has none."""
    parameter = parameters_of(pipeline).get(argument)
    return None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default


def result_of(cls: type) -> str | None:
    """The field of the pipeline's output that has what it makes, a key of RESULTS; None: it makes nothing of them."""
    return next((name for name in _output_of(cls) if name in RESULTS), None)


def soundtrack_of(cls: type) -> str:
    """The field of the pipeline's output that has the sound of its video; empty: there is none."""
    made = _output_of(cls)
    films = any(RESULTS.get(name) == "video" for name in made)
    return next((name for name in _SOUNDTRACKS if films and name in made), "")


@cache
def _output_of(cls: type) -> list[str]:
    """Fields of what the pipeline's call returns; empty: it makes nothing of RESULTS."""
    if (own := getattr(cls, "fields", None)) is not None:  # of blocks
        return list(own)
    if not inspect.isfunction(cls.__call__):
        return []
    source, module = inspect.getsource(cls.__call__), sys.modules[cls.__module__]
    returned = re.findall(r"return\s+(\w+Output)\(", source)
    for name in dict.fromkeys(returned or re.findall(r"\w+Output\b", source)):  # some return another pipeline's
        output = getattr(module, name, None) or getattr(pipeline_utils, name, None)
        if is_dataclass(output) and not RESULTS.keys().isdisjoint(names := [each.name for each in fields(output)]):
            return names
    return []


def why_not(cls: type) -> str | None:
    """Why requests cannot be made into calls of the class; None: they can."""
    result = result_of(cls)
    if result is None:
        return "makes no images, video or sound"
    parameters = parameters_of(cls)
    starts_from_a_picture = "image" in parameters and _is_required(parameters["image"])
    if "prompt" not in parameters and not starts_from_a_picture and not takes_labels(cls):
        return "takes no prompt"
    if "num_inference_steps" not in parameters:
        return "takes no number of denoising steps"
    lacking = [name for name in _NOT_BROUGHT if name in parameters]
    lacking += [name for name in _CONTROL_VIDEOS if name in parameters and not _takes_frames(cls, name)]
    if not control_of(cls) and not control_video_of(cls) and mask_of(cls) != "control_mask":
        lacking += _nets_of(cls)
    if lacking:
        return f"needs something for its {lacking[0]}"
    if not (picture_of(cls) or video_of(cls)) and (_STARTS_FROM_ELSE.search(cls.__name__) or needs_picture(cls)):
        return "needs something other than an image or a video to start from"
    from_a_video = video_of(cls) or control_video_of(cls)
    if RESULTS[result] == "video" and not from_a_video and not any(name in parameters for name in FRAMES):
        return "takes no number of frames"
    if RESULTS[result] == "sound" and not any(name in parameters for name in SECONDS):
        return "takes no length of a sound"
    known = _REQUESTS_BRING | set(GUIDANCE) | set(FRAMES) | set(SECONDS)
    missing = [name for name, each in parameters.items() if _is_required(each) and name not in known]
    missing = [name for name in missing if parameters[name].annotation is not str]  # a request can say it
    return f"needs {' and '.join(missing)}" if missing else None


def sibling(name: str) -> str | None:
    """A class of diffusers of the same model that makes media of a prompt."""
    stem = re.sub(r"ControlNet|Control|Adapter|Prior|VideoToVideo|Union|Decoder|XS|Pipeline$", "", name)
    for candidate in (f"{stem}Pipeline", f"{stem}CombinedPipeline"):
        cls = getattr(diffusers, candidate, None)
        if candidate != name and inspect.isclass(cls) and issubclass(cls, DiffusionPipeline) and why_not(cls) is None:
            return candidate
    return None


def _is_required(parameter: inspect.Parameter) -> bool:
    named = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    return named and parameter.default is inspect.Parameter.empty


def guidance_of(cls: Any) -> str:
    """The argument for the guidance; empty: there is none."""
    names = [name for name in GUIDANCE if name in parameters_of(cls)]
    return next((name for name in names if default_of(cls, name) is not None), names[0] if names else "")


def first_of(cls: type, names: tuple[str, ...]) -> str:
    """The first of `names` that the call takes; empty: none."""
    return next((name for name in names if name in parameters_of(cls)), "")


def _nets_of(cls: type) -> list[str]:
    wanted = inspect.signature(cls.__init__).parameters
    return [name for name in NETS if name in wanted]


def mask_of(cls: type) -> str:
    """The argument for a mask; empty: there is none."""
    return first_of(cls, ("mask_image", "control_mask"))


def picture_of(cls: type) -> str:
    """The argument for pictures to start from; empty: there is none."""
    if mask_of(cls) == "control_mask":
        return "control_image"
    return first_of(cls, ("image",)) if control_of(cls) != "image" else ""


def control_of(cls: type) -> str:
    """The argument for pictures that say where things are, such as edges, depths or poses; empty: there is none."""
    if mask_of(cls) == "control_mask":  # it reads the picture that the mask is of
        return ""
    return first_of(cls, ("control_image", *(("image",) if _nets_of(cls) else ())))


def video_of(cls: type) -> str:
    """The argument for a video to start from; empty: there is none."""
    return "video" if _takes_frames(cls, "video") else ""


def control_video_of(cls: type) -> str:
    """The argument for a video that says where things are; empty: there is none."""
    return next((name for name in _CONTROL_VIDEOS if _takes_frames(cls, name)), "")


def _takes_frames(cls: type, name: str) -> bool:
    """Whether an argument is a list of pictures; some classes take a video as a tensor of a form of their own."""
    parameter = parameters_of(cls).get(name)
    return parameter is not None and "list[" in str(parameter.annotation).lower()


def needs_video(cls: type) -> bool:
    """Whether a call without a video to start from fails."""
    video = video_of(cls)
    return bool(video) and (_is_required(parameters_of(cls)[video]) or bool(_STARTS_FROM_A_VIDEO.search(cls.__name__)))


def continues_video(cls: type) -> bool:
    """Whether calls continue the video that they start from; otherwise its frames become others."""
    return bool(video_of(cls)) and bool(first_of(cls, _CONTINUE))


def takes_labels(cls: type) -> bool:
    """Whether calls take the numbers of classes, and no prompt."""
    return LABELS in parameters_of(cls) and "prompt" not in parameters_of(cls)


def needs_picture(cls: type) -> bool:
    """Whether a call without a picture to start from fails."""
    picture = picture_of(cls)
    is_required = bool(picture) and _is_required(parameters_of(cls)[picture])
    named = not needs_video(cls) and bool(_STARTS_FROM_A_PICTURE.search(cls.__name__))
    return is_required or bool(mask_of(cls)) or named


def variant(cls: type, word: str) -> str | None:
    """Name of the class of diffusers that does what `word` says, "Img2Img", "Inpaint" or "VideoToVideo", with the same
    models."""
    if (own := getattr(cls, "variants", None)) is not None:  # of blocks
        return own[word].__name__ if word in own else None
    name = re.sub(r"Pipeline$", f"{word}Pipeline", cls.__name__)
    if mask_of(cls) or name not in dir(diffusers):
        return None
    made = getattr(diffusers, name)
    if word == "VideoToVideo":
        return name if needs_video(made) and not control_video_of(made) and why_not(made) is None else None
    takes_its_own = picture_of(made) and bool(mask_of(made)) == (word == "Inpaint")
    return name if takes_its_own and "prompt" in parameters_of(made) else None


def frames_per_second(cls: Any) -> float:
    """As the call says, else as the class's own example writes its video."""
    for name in RATES:
        if isinstance(value := default_of(cls, name), (int, float)):
            return float(value)
    written = re.search(r"export_to_video\([^)]*fps\s*=\s*(\d+)", inspect.getsource(sys.modules[cls.__module__]))
    return float(written[1]) if written else 16.0


# What follows reads a loaded pipeline.


def is_denoiser(cls: type) -> bool:
    """Whether models of the class are called at each step: with its time."""
    return issubclass(cls, torch.nn.Module) and any(map(_TIMES.search, inspect.signature(cls.forward).parameters))


def denoisers(pipeline: Any) -> dict[str, torch.nn.Module]:
    """Models that are called at each step, by their components' names."""
    return {name: part for name, part in pipeline.components.items() if part is not None and is_denoiser(type(part))}


def configs_of(pipeline: Any) -> list[Any]:
    """Configs of the denoisers; several ControlNets as one have none."""
    return [each.config for each in denoisers(pipeline).values() if hasattr(each, "config")]


def _number_of(pipeline: Any, *names: str) -> int | None:
    """The first attribute that is a number."""
    return next((value for name in names if isinstance(value := getattr(pipeline, name, None), int)), None)


def spatial_scale(pipeline: Any) -> int:
    """Pixels a latent, along a side."""
    own = _number_of(pipeline, "vae_scale_factor_spatial", "vae_spatial_compression_ratio", "vae_scale_factor")
    return own or _number_of(getattr(pipeline, "vae", None), "spatial_compression_ratio") or 8


def frames_multiple(pipeline: Any) -> int:
    """The number that frames - 1 is a multiple of."""
    own = _number_of(pipeline, "vae_scale_factor_temporal", "vae_temporal_compression_ratio")
    return own or _number_of(getattr(pipeline, "vae", None), "temporal_compression_ratio") or 1


def size_multiple(pipeline: Any) -> int:
    """The least that the class's own check of sizes and the denoisers' patches take."""
    scale = spatial_scale(pipeline) * getattr(pipeline, "packs", 1)
    patches = [_side(getattr(config, "patch_size", None)) or 1 for config in configs_of(pipeline)]
    return math.lcm(*(scale * patch for patch in patches), next(s for s in _sides(scale) if _is_taken(pipeline, s)))


def _sides(scale: int) -> list[int]:
    """Sides to try; the last is believed."""
    return [scale * times for times in _MULTIPLES]


def _side(value: Any) -> int | None:
    """The last of several: width is after frames and height."""
    value = value[-1] if isinstance(value, (tuple, list)) and value else value
    return value if isinstance(value, int) else None


def _is_taken(pipeline: Any, side: int) -> bool:
    """Whether `check_inputs` has nothing against a square of `side` pixels."""
    check = getattr(pipeline, "check_inputs", None)
    if check is None or side == _sides(spatial_scale(pipeline))[-1]:
        return True
    given: dict[str, Any] = {}
    for name, each in inspect.signature(check).parameters.items():
        if name in ("height", "width"):
            given[name] = side
        elif name == "prompt":
            given[name] = "a"
        elif _is_required(each):
            given[name] = default_of(type(pipeline), name)
    try:
        check(**given)
    except Exception as error:  # of what it lacks, it may say anything
        return "divisible" not in str(error)
    return True


def own_size(pipeline: Any) -> tuple[int, int]:
    """(width, height) that calls without a size have; (0, 0): it is not known."""
    cls, scale = type(pipeline), spatial_scale(pipeline)
    width, height = (default_of(cls, name) or _set_in_code(cls, name) for name in ("width", "height"))
    if isinstance(width, int) and isinstance(height, int):
        return width, height
    for source in (pipeline, *configs_of(pipeline)):
        own = getattr(source, "default_width", None), getattr(source, "default_height", None)
        if isinstance(own[0], int) and isinstance(own[1], int):
            return own[0], own[1]
        for width, height in (("default_sample_size",) * 2, ("sample_width", "sample_height"), ("sample_size",) * 2):
            sides = getattr(source, width, None), getattr(source, height, None)
            sides = (sides[0][1], sides[0][0]) if isinstance(sides[0], (tuple, list)) and len(sides[0]) == 2 else sides
            if isinstance(sides[0], int) and isinstance(sides[1], int):
                return sides[0] * scale, sides[1] * scale
    return 0, 0


def _set_in_code(cls: type, argument: str) -> int | None:
    """What the call's code sets an argument to that is None; None: it sets no number."""
    if not inspect.isfunction(cls.__call__):
        return None
    code = inspect.getsource(cls.__call__)
    found = re.search(rf"\bif {argument} is None:\n\s+{argument} = (\d+)\n", code)
    return int(found[1]) if found else None


def own_frames(pipeline: Any, argument: str) -> int:
    """Frames of a call that gives none; 0: it is not known."""
    configs = configs_of(pipeline)
    known = [default_of(type(pipeline), argument), _set_in_code(type(pipeline), argument)]
    known += [getattr(pipeline, "default_num_frames", None)]
    known += [getattr(config, name, None) for name in ("sample_frames", "num_frames") for config in configs]
    return next((value for value in known if isinstance(value, int)), getattr(pipeline, "usual_frames", 0))


def classes(pipeline: Any) -> int:
    """How many classes the models know; 0: prompts are texts, or the models know none."""
    if not takes_labels(type(pipeline)):
        return 0
    return next((number for config in configs_of(pipeline) if (number := _number_of(config, *_CLASSES))), 0)


def tokenizer_of(pipeline: Any) -> PreTrainedTokenizerBase | None:
    """The one that reads most of a prompt, alone or in a processor; None: there is none."""
    parts = [getattr(part, "tokenizer", part) for part in pipeline.components.values()]
    tokenizers = [part for part in parts if isinstance(part, PreTrainedTokenizerBase)]
    return max(tokenizers, key=lambda each: min(each.model_max_length, _LEAST_TOKENS_OF_NO_LIMIT), default=None)


def max_prompt_tokens(pipeline: Any) -> int:
    """0: it is not known."""
    own = default_of(type(pipeline), "max_sequence_length")
    if isinstance(own, int):
        return own
    tokenizer = tokenizer_of(pipeline)
    most = tokenizer.model_max_length if tokenizer is not None else 0
    return most if most < _LEAST_TOKENS_OF_NO_LIMIT else 0


def sample_rate_hz(pipeline: Any) -> int:
    """Of the sound that it makes. Raises ValueError: no config says it."""
    for name in ("vocoder", "audio_vae", "sound_tokenizer", "vae", "autoencoder"):
        config = getattr(getattr(pipeline, name, None), "config", None)
        if rate := _number_of(config, "sampling_rate", "sample_rate", "output_sampling_rate"):
            return rate
    if rate := _number_of(pipeline, "sample_rate", "sampling_rate", "audio_sampling_rate", "sound_sampling_rate"):
        return rate
    raise ValueError(f"{type(pipeline).__name__} is not served: no model of it says its sample rate")
