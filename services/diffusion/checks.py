"""A request (DitStart), checked against what the model takes, but for its pictures' content."""

from quartet.v1 import dit_pb2, server_info_pb2
from services.common.errors import InvalidInput, require

MAX_PREVIEWS = 10
MAX_GUIDANCE_SCALE = 1000.0
MAX_PROGRESS_INTERVAL_MS = 60_000
MAX_LORA_WEIGHT = 100.0
MAX_PROMPT_CHARACTERS = 65_536
MAX_CONTEXT_PARTS = 256
MOST_OF_A_TOKEN = 64  # characters: a prompt with more for each of its tokens is not tokenized
MAX_FRAME_BYTES = 15 * 1024 * 1024  # gRPC's messages here may have 16 MiB
_IMAGES = (dit_pb2.DIT_TASK_TEXT_TO_IMAGE, dit_pb2.DIT_TASK_IMAGE_EDIT)


def check(start: dit_pb2.DitStart, info: server_info_pb2.DitInfo) -> dit_pb2.DitTask:
    """The task. Checks all but the pictures' content.

    Raises:
        InvalidInput: names the field.
    """
    most = min(MAX_PROMPT_CHARACTERS, MOST_OF_A_TOKEN * info.max_prompt_tokens or MAX_PROMPT_CHARACTERS)
    for field, text in (("prompt", start.prompt), ("negative_prompt", start.negative_prompt)):
        require(len(text) <= most, field, f"has {len(text)} characters; at most {most} are read: shorten it")
    require(start.prompt.strip(), "prompt", "is required")
    if start.HasField("negative_prompt") and not info.negative_prompt:
        raise InvalidInput("negative_prompt", f"{info.pipeline} takes none; leave it out")
    _check_images(start, info)
    if start.context:
        _check_context(start, info, most)
    task = _task(start, info)
    require((start.count or 1) <= info.max_count, "count", f"must be at most {info.max_count}")
    if start.width or start.height:
        require(not info.sample_rate_hz, "width", "sound has no size; leave width and height out")
        check_size(start.width, start.height, info)
    if info.frames_multiple and task != dit_pb2.DIT_TASK_TEXT_TO_IMAGE:
        of_video = start.HasField("video") or start.HasField("control_video")  # it has as many as that
        frames = start.num_frames or (0 if of_video else info.default_frames)
        check_frames(start.width or info.default_width, start.height or info.default_height, frames, start, info)
    if start.HasField("num_inference_steps") and not 1 <= start.num_inference_steps <= info.max_inference_steps:
        raise InvalidInput("num_inference_steps", f"must be 1 to {info.max_inference_steps}")
    if start.HasField("guidance_scale") and not 0 <= start.guidance_scale <= MAX_GUIDANCE_SCALE:
        raise InvalidInput("guidance_scale", f"must be 0 to {MAX_GUIDANCE_SCALE:g}")
    if start.progress_interval_ms > MAX_PROGRESS_INTERVAL_MS:
        raise InvalidInput("progress_interval_ms", f"must be at most {MAX_PROGRESS_INTERVAL_MS}")
    _check_length(start, info, task)
    _check_loras(start, info)
    steps = start.num_inference_steps or info.default_inference_steps
    if start.previews and task not in _IMAGES:
        raise InvalidInput("previews", "only pictures have previews; leave it out")
    require(not (start.previews and info.without_previews), "previews", f"{info.pipeline} has none; leave it out")
    if start.previews > min(MAX_PREVIEWS, steps - 1):
        raise InvalidInput("previews", f"must be at most {min(MAX_PREVIEWS, steps - 1)}, fewer than the steps")
    return task


def _check_images(start: dit_pb2.DitStart, info: server_info_pb2.DitInfo) -> None:
    if len(start.images) > info.max_images:
        most = f"at most {info.max_images} are taken" if info.max_images else f"{info.pipeline} takes none"
        raise InvalidInput("images", f"there are {len(start.images)}; {most}")
    if start.HasField("mask"):
        require(info.mask, "mask", f"{info.pipeline} takes none; leave it out")
        require(len(start.images) == 1, "mask", "needs exactly one picture in images, which it is a mask of")
    if (count := len(start.control_images)) != info.control_images:
        wanted = f"needs {info.control_images}" if info.control_images else "takes none"
        raise InvalidInput("control_images", f"there are {count}; {info.pipeline} {wanted}")
    if start.HasField("video"):
        takes_video = dit_pb2.DIT_TASK_VIDEO_TO_VIDEO in info.tasks
        require(takes_video, "video", f"{info.pipeline} takes none; leave it out")
        require(not start.images, "video", "is there with images; send one of the two")
    if start.HasField("control_video") != info.control_video:
        wanted = "needs one" if info.control_video else "takes none; leave it out"
        raise InvalidInput("control_video", f"{info.pipeline} {wanted}")


def _check_context(start: dit_pb2.DitStart, info: server_info_pb2.DitInfo, most: int) -> None:
    """`most`: characters of it and the prompt."""
    require(info.reads_context, "context", f"{info.pipeline} reads none; leave it out")
    if (count := len(start.context)) > MAX_CONTEXT_PARTS:
        advice = "leave out the oldest"
        raise InvalidInput("context", f"has {count} parts; at most {MAX_CONTEXT_PARTS} are read: {advice}")
    seen: set[int] = set()
    for i, part in enumerate(start.context):
        match part.WhichOneof("part"):
            case "text":
                require(part.text, f"context[{i}].text", "is empty; leave the part out")
            case "image":
                field, pictures = f"context[{i}].image", len(start.images)
                if part.image >= pictures:
                    raise InvalidInput(field, f"is {part.image}; images has {pictures}, counted from 0")
                require(
                    part.image not in seen, field, f"is {part.image}, as of an earlier part; send the picture again"
                )
                seen.add(part.image)
            case None:
                raise InvalidInput(f"context[{i}]", "has no text and no image; it needs one of them")
    characters = len(start.prompt) + sum(len(part.text) for part in start.context)
    if characters > most:
        reason = f"has {characters} characters with the prompt; at most {most} are read: leave out the oldest parts"
        raise InvalidInput("context", reason)


def _task(start: dit_pb2.DitStart, info: server_info_pb2.DitInfo) -> dit_pb2.DitTask:
    name = dit_pb2.DitTask.Name
    require(start.task in dit_pb2.DitTask.values(), "task", f"{start.task} is not a DitTask")
    takes_images = (dit_pb2.DIT_TASK_IMAGE_EDIT, dit_pb2.DIT_TASK_IMAGE_TO_VIDEO)
    if start.task and start.task not in info.tasks:
        known = ", ".join(name(task) for task in info.tasks)
        raise InvalidInput("task", f"{info.pipeline} does not do {name(start.task)}; it does {known}")
    candidates = [start.task] if start.task else info.tasks
    given = bool(start.images), start.HasField("video")
    taken = {task: (task in takes_images, task == dit_pb2.DIT_TASK_VIDEO_TO_VIDEO) for task in candidates}
    fitting = [task for task, inputs in taken.items() if inputs == given]
    if not fitting:
        images, video = given
        require(not video, "video", "is not taken by this task")
        require(not images, "images", "are not taken by this task")
        require(any(images for images, _ in taken.values()), "video", "is required")
        raise InvalidInput("images", "at least one is required")
    return fitting[0]


def check_size(width: int, height: int, info: server_info_pb2.DitInfo) -> None:
    """Raises InvalidInput: a side, in pixels, is none that the model makes, or the picture is too large."""
    for field, value in (("width", width), ("height", height)):
        if not value or value % info.size_multiple:
            raise InvalidInput(field, f"must be a multiple of {info.size_multiple} pixels, not {value}")
        require(value <= info.max_side, field, f"{width} x {height}: a side may have at most {info.max_side} pixels")
    if width * height > info.max_pixels:
        raise InvalidInput("width", f"{width} x {height} is over the {info.max_pixels} pixels that are made")


def check_frames(width: int, height: int, frames: int, start: dit_pb2.DitStart, info: server_info_pb2.DitInfo) -> None:
    """Raises InvalidInput: a video of so many frames, which leave in a message each, is too large."""
    frame_pixels = width * height
    pixels = frame_pixels * frames * (start.count or 1)
    if pixels > info.max_video_pixels:
        field = "num_frames" if start.num_frames else "width"
        raise InvalidInput(field, f"all frames together have {pixels} pixels; at most {info.max_video_pixels} are made")
    is_float = start.pixel_format == dit_pb2.PIXEL_FORMAT_FLOAT32
    frame_bytes = frame_pixels * 3 * (4 if is_float else 1)
    if frame_bytes > MAX_FRAME_BYTES:
        field = "pixel_format" if is_float else "width"
        raise InvalidInput(field, f"a frame would have {frame_bytes} bytes; at most {MAX_FRAME_BYTES} can be sent")


def _check_length(start: dit_pb2.DitStart, info: server_info_pb2.DitInfo, task: dit_pb2.DitTask) -> None:
    is_still = task == dit_pb2.DIT_TASK_TEXT_TO_IMAGE
    reads_more = bool(start.images) or start.HasField("video")
    if start.num_frames == 1 and reads_more and dit_pb2.DIT_TASK_TEXT_TO_IMAGE in info.tasks:
        least = info.frames_multiple + 1
        raise InvalidInput("num_frames", f"one frame is made of a prompt alone; ask for {least} or more")
    if start.num_frames:
        require(not is_still or start.num_frames == 1, "num_frames", "an image is one frame; leave it out")
        require(info.frames_multiple, "num_frames", f"{info.pipeline} makes no video; leave it out")
        if start.num_frames > info.max_frames or (start.num_frames - 1) % info.frames_multiple:
            raise InvalidInput(
                "num_frames", f"must be 1 more than a multiple of {info.frames_multiple}, at most {info.max_frames}"
            )
    if start.audio_s:
        require(info.sample_rate_hz, "audio_s", f"{info.pipeline} makes no sound; leave it out")
        least_s = 1 / info.sample_rate_hz
        if not least_s <= start.audio_s <= info.max_audio_s:
            raise InvalidInput("audio_s", f"must be {least_s:.2g} s, a sample, to {info.max_audio_s:g} s")


def _check_loras(start: dit_pb2.DitStart, info: server_info_pb2.DitInfo) -> None:
    seen: set[str] = set()
    for i, lora in enumerate(start.loras):
        if lora.name not in info.loras:
            known = f"there are: {', '.join(info.loras)}" if info.loras else "this server has none"
            raise InvalidInput(f"loras[{i}].name", f"there is no adapter '{lora.name}'; {known}")
        require(lora.name not in seen, f"loras[{i}].name", f"'{lora.name}' is there twice")
        if not abs(lora.weight) <= MAX_LORA_WEIGHT:
            raise InvalidInput(f"loras[{i}].weight", f"must be {-MAX_LORA_WEIGHT:g} to {MAX_LORA_WEIGHT:g}")
        seen.add(lora.name)
