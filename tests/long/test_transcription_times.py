"""Ten minutes of speech by espeak-ng, with known pauses, are written down between these pauses."""

import io

import pytest
import soundfile

from gateway.listening.silero import RATE_HZ
from gateway.listening.speech_windows import MAX_WINDOW_S, Pauses
from gateway.media.encode import encode_audio
from tests.support.samples.espeak import recording
from tests.support.scripted.thinker import PIECES
from tests.support.systems.gateway import running

pytestmark = pytest.mark.weekly
LENGTH_S = 600
PAUSES_S = (0.6, 0.8, 1.2, 2.0)
SURE_S = 0.8  # a pause of so much is one, whatever the detector's own delay
NEAR_S = 0.3
HANG_GUARD_S = 500


async def test_segments_begin_and_end_at_the_pauses():
    talk = recording(LENGTH_S, PAUSES_S)
    wav = encode_audio(talk.pcm16, talk.rate_hz, "wav")
    async with running() as gateway:
        transcriptions = gateway.openai.with_options(timeout=HANG_GUARD_S).audio.transcriptions
        written = await transcriptions.create(
            model="scripted", file=("talk.wav", wav), response_format="verbose_json", language="en"
        )
        asked = [start.messages[0].content[0].media.data for start in gateway.scripts["thinker"].requests]
    assert written.duration == pytest.approx(talk.clips[-1][1], abs=max(PAUSES_S) + 0.1)
    segments = written.segments or []
    begins, ends = ([clip[i] for clip in talk.clips] for i in (0, 1))
    for segment in segments:
        assert min(abs(segment.start - begin) for begin in begins) < NEAR_S, segment
        assert min(abs(segment.end - end) for end in ends) < NEAR_S, segment
        assert segment.text == "".join(PIECES)
    sure = [begin for end, begin in zip([0.0, *ends], begins, strict=False) if begin - end >= SURE_S]
    assert len(sure) > 20
    for begin in sure:
        assert any(abs(segment.start - begin) < NEAR_S for segment in segments), begin
    # What the thinker hears fits a request, and is the speech with little around it: the pauses are not asked about.
    assert len(asked) == len(segments)
    heard_s = [soundfile.info(io.BytesIO(sound)).duration for sound in asked]
    assert {soundfile.info(io.BytesIO(sound)).samplerate for sound in asked} == {RATE_HZ}
    assert max(heard_s) <= MAX_WINDOW_S
    around_s = 2 * (Pauses().padding_s + NEAR_S)
    assert sum(heard_s) < sum(segment.end - segment.start + around_s for segment in segments) < written.duration
