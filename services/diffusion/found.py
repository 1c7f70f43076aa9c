"""What a pipeline class of diffusers says of itself: its call's signature, its output class, its models and checks."""

import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal

import diffusers
from diffusers.pipelines import pipeline_utils
from diffusers.pipelines.pipeline_utils import DiffusionPipeline

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
NETS = ("controlnet", "adapter")  # components that read control images
_CONTROL_VIDEOS = ("control_video", "conditioning_frames")
CONTEXT = "context"  # the argument for a conversation, a list of texts and pictures before the prompt
LABELS = "class_labels"  # the argument for numbers of classes
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
    makes_videos = any(RESULTS.get(name) == "video" for name in made)
    return next((name for name in _SOUNDTRACKS if makes_videos and name in made), "")


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
    starts_from_a_picture = "image" in parameters and is_required(parameters["image"])
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
    missing = [name for name, each in parameters.items() if is_required(each) and name not in known]
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


def is_required(parameter: inspect.Parameter) -> bool:
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
    return bool(video) and (is_required(parameters_of(cls)[video]) or bool(_STARTS_FROM_A_VIDEO.search(cls.__name__)))


def continues_video(cls: type) -> bool:
    """Whether calls continue the video that they start from; otherwise its frames become others."""
    return bool(video_of(cls)) and bool(first_of(cls, _CONTINUE))


def reads_context(cls: type) -> bool:
    """Whether calls take a conversation before the prompt."""
    return CONTEXT in parameters_of(cls)


def takes_labels(cls: type) -> bool:
    """Whether calls take the numbers of classes, and no prompt."""
    return LABELS in parameters_of(cls) and "prompt" not in parameters_of(cls)


def needs_picture(cls: type) -> bool:
    """Whether a call without a picture to start from fails."""
    picture = picture_of(cls)
    named = not needs_video(cls) and bool(_STARTS_FROM_A_PICTURE.search(cls.__name__))
    return (bool(picture) and is_required(parameters_of(cls)[picture])) or bool(mask_of(cls)) or named


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
