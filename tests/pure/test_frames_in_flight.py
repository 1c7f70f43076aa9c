"""The queues between a talker and its listener are parts of one number."""

from inspect import signature

from services.code2wav.config import Code2WavSettings
from services.code2wav.servicer import WINDOW_STEPS
from services.common.stream.consumer import CREDITS
from services.common.stream.frames_in_flight import FRAMES_IN_FLIGHT
from services.talker.engine import TalkerEngine
from services.talker.servicer import MAX_PENDING_FRAMES


def test_each_queue_has_its_part() -> None:
    steps = Code2WavSettings.model_fields["max_frames_per_step"].default
    assert signature(TalkerEngine).parameters["max_frames_ahead"].default == FRAMES_IN_FLIGHT == 128
    assert (MAX_PENDING_FRAMES, CREDITS, WINDOW_STEPS * steps) == (64, 32, 4 * 16)
