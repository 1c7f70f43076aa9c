"""Speech and transcriptions by pipecat: python pipecat_speech.py BASE_URL TEXT. See README.md."""

import asyncio
import json
import os
import sys
from typing import Any

from loguru import logger
from pipecat.frames.frames import (
    ErrorFrame,
    Frame,
    InputAudioRawFrame,
    TranscriptionFrame,
    TTSAudioRawFrame,
    TTSSpeakFrame,
    VADUserStartedSpeakingFrame,
    VADUserStoppedSpeakingFrame,
)
from pipecat.pipeline.worker import PipelineParams
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.services.openai.stt import OpenAISTTService
from pipecat.services.openai.tts import OpenAITTSService
from pipecat.tests.utils import run_test

base_url, text = sys.argv[1:]
access: dict[str, Any] = {"api_key": os.environ["OPENAI_API_KEY"], "base_url": base_url}
RATE_HZ = 24_000
report: dict[str, Any] = {"transcripts": [], "errors": []}


async def run(service: FrameProcessor, *frames: Frame) -> list[Frame]:
    """What the service makes of the frames, in a pipeline of its own."""
    rates = PipelineParams(audio_in_sample_rate=RATE_HZ, audio_out_sample_rate=RATE_HZ)
    down, up = await run_test(service, frames_to_send=frames, pipeline_params=rates, start_timeout=60)
    report["errors"] += [frame.error for frame in (*down, *up) if isinstance(frame, ErrorFrame)]
    return list(down)


async def main() -> None:
    spoken = await run(OpenAITTSService(**access), TTSSpeakFrame(text))
    sound = b"".join(frame.audio for frame in spoken if isinstance(frame, TTSAudioRawFrame))
    report["spoken_s"] = len(sound) / 2 / RATE_HZ
    heard = VADUserStartedSpeakingFrame(), InputAudioRawFrame(sound, RATE_HZ, 1), VADUserStoppedSpeakingFrame()
    for options in ({}, {"include_prob_metrics": True}):
        written = await run(OpenAISTTService(**access, **options), *heard)
        report["transcripts"] += [frame.text for frame in written if isinstance(frame, TranscriptionFrame)]
    print(json.dumps(report))


logger.remove()
asyncio.run(main())
