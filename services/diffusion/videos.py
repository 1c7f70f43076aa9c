"""Videos of a request, read as a model takes them: at its frame rate, and of the size of the output."""

from typing import TYPE_CHECKING

from quartet.v1 import dit_pb2, server_info_pb2
from services.common.media import MediaError
from services.common.media.calls import Read
from services.diffusion.pictures import fitted

if TYPE_CHECKING:
    from PIL.Image import Image

_LANCZOS = 1  # PIL's filter
_ANY_LENGTH_S = float("inf")  # only the frames that are wanted are kept


def read_frames(
    data: bytes, start: dit_pb2.DitStart, info: server_info_pb2.DitInfo, max_pixels: int, read: Read
) -> "list[Image]":
    """The frames of a video file at `info.frames_per_second`, from the first one.

    Without `start.num_frames` all of them, but for the last ones that the model cannot make; otherwise so many, or of a
    video that is continued at most so many. Without `start.width` they have the shape of the video, and at most the
    pixels of the model's own size.

    Args:
        max_pixels: of all frames.

    Raises:
        MediaError: no video, too long, too short, or too large.
    """
    from PIL import Image

    ((total, rate, width, height, _),) = read("video", data, _ANY_LENGTH_S)
    at_rate = max(1, int(total * info.frames_per_second / rate))
    count = _count(at_rate, start, info)
    wanted = [min(total - 1, int(i * rate / info.frames_per_second)) for i in range(count)]
    distinct = sorted(set(wanted))
    frames: list[Image.Image] = []
    size = start.width, start.height
    for pixels in read("frames", data, width, height, distinct):
        frame = Image.fromarray(pixels)
        if not frames:  # only now its size is known: players turn some videos
            if not start.width:
                own = info.default_width * info.default_height or info.max_pixels
                size = fitted(*frame.size, own, info.size_multiple)
            if (needed := count * size[0] * size[1]) > max_pixels:
                reason = f"{count} frames of {size[0]} x {size[1]} are {needed} pixels; at most {max_pixels} are taken"
                raise MediaError(f"{reason}: ask for fewer frames, or for a smaller size")
        frames.append(frame.resize(size, _LANCZOS))
    if not frames:
        raise MediaError("the video has no frames that can be decoded")
    places = {index: place for place, index in enumerate(distinct)}
    return [frames[min(places[index], len(frames) - 1)] for index in wanted]


def _count(at_rate: int, start: dit_pb2.DitStart, info: server_info_pb2.DitInfo) -> int:
    """How many frames to read of `at_rate`. Raises MediaError."""
    has = f"it has {at_rate} frames at {info.frames_per_second:g} a second"
    if not info.continues_video or not start.HasField("video"):
        if start.num_frames > at_rate:
            raise MediaError(f"{has}, fewer than the {start.num_frames} of num_frames")
        if not start.num_frames and at_rate > info.max_frames:
            raise MediaError(f"{has}; at most {info.max_frames} are made: make it shorter, or say num_frames")
        if at_rate <= info.frames_multiple:
            raise MediaError(f"{has}; at least {info.frames_multiple + 1} are needed")
    most = min(at_rate, start.num_frames or info.max_frames)
    return (most - 1) // info.frames_multiple * info.frames_multiple + 1
