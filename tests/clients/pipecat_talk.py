"""A conversation by pipecat: python pipecat_talk.py BASE_URL DIRECTORY. See README.md."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from loguru import logger
from microphone import Microphone
from pipecat.frames.frames import (
    BotStartedSpeakingFrame,
    BotStoppedSpeakingFrame,
    Frame,
    InterruptionFrame,
    LLMRunFrame,
    TranscriptionFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.llm_service import FunctionCallParams
from pipecat.services.openai.realtime.events import (
    AudioConfiguration,
    AudioInput,
    InputAudioTranscription,
    SessionProperties,
    SessionUpdateEvent,
)
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.workers.runner import WorkerRunner
from pipecat_sound import Ear, Loudspeaker


class Witness(FrameProcessor):
    """Speaks in turn: into the first answer, and after the second. Is done after the third, and a transcript."""

    def __init__(self, microphone: Microphone, report: dict[str, Any]) -> None:
        super().__init__()
        self._microphone, self._report = microphone, report
        self._speaking, self._interrupted = False, False
        self.done = asyncio.Event()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        answers = self._report["interrupted"]
        if isinstance(frame, BotStartedSpeakingFrame):
            self._speaking, self._interrupted = True, False
            if not answers:
                self._microphone.say("second")
        elif isinstance(frame, InterruptionFrame) and self._speaking:
            self._interrupted = True
        elif isinstance(frame, BotStoppedSpeakingFrame) and self._speaking:
            self._speaking = False
            answers.append(self._interrupted)
            if len(answers) == 2:
                self._microphone.say("third")
        elif isinstance(frame, TranscriptionFrame):
            self._report["transcripts"].append(frame.text)
        if len(answers) == 3 and self._report["transcripts"]:
            self.done.set()
        await self.push_frame(frame, direction)


async def main() -> None:
    base_url, directory = sys.argv[1:]
    microphone = Microphone(Path(directory), piece_ms=20)
    report: dict[str, Any] = {"calls": [], "interrupted": [], "transcripts": [], "errors": []}

    async def lamp(params: FunctionCallParams, on: bool) -> None:
        """Turns the lamp on or off.

        Args:
            on: Whether it shall be on.
        """
        report["calls"].append({"on": on})
        await params.llm.send_client_event(SessionUpdateEvent(session=SessionProperties(tool_choice="none")))
        await params.result_callback("done")

    llm = OpenAIRealtimeLLMService(
        api_key=os.environ["OPENAI_API_KEY"],
        base_url=f"{base_url.replace('http', 'ws', 1)}/realtime",
        settings=OpenAIRealtimeLLMService.Settings(
            system_instruction="Be brief.",
            session_properties=SessionProperties(
                audio=AudioConfiguration(input=AudioInput(transcription=InputAudioTranscription())),
                tool_choice="required",
            ),
        ),
    )
    context = LLMContext([{"role": "user", "content": "Please turn on the lamp."}], [lamp])
    aggregators = LLMContextAggregatorPair(context)
    witness = Witness(microphone, report)
    steps = [Ear(microphone), aggregators.user(), witness, llm, Loudspeaker(), aggregators.assistant()]
    worker = PipelineWorker(Pipeline(steps))

    @worker.event_handler("on_pipeline_error")
    async def failed(_worker: PipelineWorker, frame: Any) -> None:
        report["errors"].append(frame.error)

    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    await worker.queue_frame(LLMRunFrame())  # the first turn is in the context
    running = asyncio.create_task(runner.run())
    await witness.done.wait()
    await worker.cancel()
    await running
    print(json.dumps(report))


logger.remove()
asyncio.run(main())
