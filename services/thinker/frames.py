"""Which frames of videos are read, and for how many a second the model takes them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from services.common.errors import InvalidInput
from services.thinker.conversation import FrameChoice
from services.thinker.media import VideoTrack

_ALIKE = 1.1  # rates that count as one


def sample(processor: Any, total: int, rate: float, fps: float, choice: FrameChoice | None) -> np.ndarray:
    """Indices of the frames to take, ascending. transformers' video processor samples `fps` frames a second.

    Args:
        total, rate: frames of the video, and of a second.
        choice: what the request says instead of `fps`.
    """
    from transformers.video_utils import VideoMetadata

    pair = getattr(processor, "temporal_patch_size", None) or 1
    if total < pair:
        return np.zeros(pair, dtype=np.int64)
    most = total if choice is None or choice.count is None else -(-choice.count // pair) * pair
    if choice is None or choice.per_s is not None:
        metadata = VideoMetadata(total_num_frames=total, fps=rate)
        taken = np.asarray(processor.sample_frames(metadata, fps=choice.per_s if choice else fps))
        if len(taken) <= most:
            return taken
    count = min(most, total) // pair * pair
    return np.arange(count) * total // count


def rate_of(tracks: Sequence[VideoTrack], fps: float, choice: FrameChoice | None, most_s: float) -> float:
    """Frames a second that the model takes all videos of a request for.

    Args:
        fps: without a `choice`.
        most_s: time that it may take a chosen number of frames for.

    Raises:
        InvalidInput: naming a field of `video_frames`.
    """
    if choice is None or not tracks:
        return fps
    if choice.count is None and choice.per_s is not None:
        rate = choice.per_s
    else:
        rates = [len(track.wanted) / track.seconds for track in tracks]
        if max(rates) > _ALIKE * min(rates):
            reason = f"gives videos of different lengths {min(rates):.3g} to {max(rates):.3g} frames a second"
            raise InvalidInput("video_frames.count", f"{reason}, but the model reads all at one rate: choose that")
        rate = sum(rates) / len(rates)
    seconds = sum(len(track.wanted) for track in tracks) / rate
    if seconds > most_s:
        reason = f"gives videos that last {seconds:.4g} s to the model; at most {most_s:.4g} s are read"
        raise InvalidInput("video_frames", f"{reason}: take more frames a second, or fewer or shorter videos")
    return rate
