"""Which frames of a video the thinker takes where the request says so, and for what rate."""

import math
from typing import Any

import numpy as np
import pytest
from transformers import Qwen2VLVideoProcessor

from quartet.v1 import thinker_pb2
from services.common.errors import InvalidInput
from services.thinker.config import ThinkerSettings
from services.thinker.conversation import FrameChoice
from services.thinker.frames import rate_of, sample
from services.thinker.media import VideoTrack
from services.thinker.request import read_conversation

FPS = 2.0
PROCESSOR = Qwen2VLVideoProcessor(min_frames=4, max_frames=768)
# Frames of the video, of a second, the choice, and how many are taken.
CHOICES: list[tuple[int, float, FrameChoice, int]] = [
    (300, 30.0, FrameChoice(4), 4),
    (300, 30.0, FrameChoice(5), 6),  # pairs
    (300, 30.0, FrameChoice(1), 2),
    (300, 30.0, FrameChoice(100), 100),  # more than by default
    (301, 30.0, FrameChoice(2**31 - 1), 300),
    (301, 30.0, FrameChoice(), 300),
    (3000, 30.0, FrameChoice(), 3000),  # the 768 of transformers are those of a rate
    (300, 30.0, FrameChoice(per_s=1.0), 10),
    (300, 30.0, FrameChoice(per_s=0.001), 4),
    (300, 30.0, FrameChoice(per_s=1000.0), 300),
    (300, 30.0, FrameChoice(6, 1.0), 6),
    (300, 30.0, FrameChoice(32, 1.0), 10),
    (1, 30.0, FrameChoice(9, 5.0), 2),
]


@pytest.mark.parametrize(("total", "rate", "choice", "count"), CHOICES)
def test_frames_are_taken_evenly_over_the_length(total: int, rate: float, choice: FrameChoice, count: int) -> None:
    taken = sample(PROCESSOR, total, rate, FPS, choice)
    assert len(taken) == count
    assert taken[0] == 0
    assert taken[-1] < total
    steps = np.diff(taken)
    assert total == 1 or (steps.min() >= 1 and steps.max() - steps.min() <= 1 and taken[-1] + steps.max() >= total - 1)
    if choice.count is None and choice.per_s is not None:
        np.testing.assert_array_equal(taken, sample(PROCESSOR, total, rate, choice.per_s, None))


def track(taken: int, seconds: float) -> VideoTrack:
    return VideoTrack(round(seconds * 30), 30.0, (64, 64), np.arange(taken), False)


def test_the_rate_is_that_of_the_frames_that_are_taken() -> None:
    def rate(*tracks: VideoTrack, choice: FrameChoice | None = None, most_s: float = math.inf) -> float:
        return rate_of(tracks, FPS, choice, most_s)

    assert rate(track(4, 2.0), track(4, 20.0), most_s=1.0) == FPS  # as the thinker is set: as it always was
    assert rate(choice=FrameChoice(4)) == FPS
    assert rate(track(4, 10.0), choice=FrameChoice(4)) == 0.4
    assert rate(track(4, 10.0), track(4, 10.5), choice=FrameChoice(4)) == pytest.approx(0.39, abs=0.01)
    assert rate(track(10, 5.0), track(30, 16.0), choice=FrameChoice(per_s=3.0)) == 3.0
    assert rate(track(8, 10.0), choice=FrameChoice(8, 2.0)) == 0.8
    with pytest.raises(InvalidInput, match=r"^video_frames.count.* 0.2 to 0.4 frames"):
        rate(track(4, 10.0), track(4, 20.0), choice=FrameChoice(4))
    assert rate(track(4, 100.0), choice=FrameChoice(4), most_s=100.0) == 0.04
    for choice in (FrameChoice(4), FrameChoice(per_s=1e-9)):
        with pytest.raises(InvalidInput, match=r"^video_frames.* at most 99 s are read: take more frames"):
            rate(track(4, 100.0), choice=choice, most_s=99.0)


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({}, FrameChoice()),
        ({"count": 3}, FrameChoice(3)),
        ({"per_s": 0.5}, FrameChoice(None, 0.5)),
        ({"count": 0}, "count"),
        ({"count": -1}, "count"),
        ({"per_s": 0.0}, "per_s"),
        ({"per_s": -1.0}, "per_s"),
        ({"per_s": 1001.0}, "per_s"),
        ({"per_s": math.inf}, "per_s"),
        ({"per_s": math.nan}, "per_s"),
    ],
)
def test_what_a_caller_may_choose(members: dict[str, Any], expected: FrameChoice | str) -> None:
    hello = thinker_pb2.ChatMessage(role="user", content=[thinker_pb2.ContentPart(text="hi")])
    start = thinker_pb2.GenerateStart(messages=[hello], video_frames=thinker_pb2.VideoFrames(**members))
    limits = ThinkerSettings(model="unused")
    if isinstance(expected, str):
        with pytest.raises(InvalidInput, match=rf"^video_frames\.{expected}"):
            read_conversation(start, [], limits)
    else:
        assert read_conversation(start, [], limits).frames == expected
