"""A conversation by pipecat with the Live API: python pipecat_live.py BASE_URL DIRECTORY DELEGATION. See README.md."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from loguru import logger
from microphone import Microphone
from openai import AsyncOpenAI
from pipecat.frames.frames import (
    BotStartedSpeakingFrame,
    BotStoppedSpeakingFrame,
    Frame,
    InterimTranscriptionFrame,
    LLMRunFrame,
    SpeechOutputAudioRawFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.llm_service import FunctionCallParams
from pipecat.services.openai.live.llm import OpenAILiveLLMService
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.services.openai.responses.llm import OpenAIResponsesLLMService
from pipecat.workers.llm.backend_llm_worker import BackendLLMWorker
from pipecat.workers.runner import WorkerRunner
from pipecat_sound import Ear, Loudspeaker
from three_turns import ThreeTurns


class Witness(FrameProcessor):
    def __init__(self, turns: ThreeTurns, report: dict[str, Any]) -> None:
        super().__init__()
        self._turns, self._report = turns, report

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, InterimTranscriptionFrame):
            self._turns.written()
        elif isinstance(frame, SpeechOutputAudioRawFrame):
            self._turns.heard(frame.audio)
        elif isinstance(frame, BotStartedSpeakingFrame | BotStoppedSpeakingFrame):
            self._report["bot"].append("started" if isinstance(frame, BotStartedSpeakingFrame) else "stopped")
        await self.push_frame(frame, direction)


def texts(context: LLMContext) -> list[tuple[str, str]]:
    """(role, text) of what both have said."""
    said = [message for message in context.get_messages() if isinstance(message, dict)]
    return [
        (each["role"], each["content"])
        for each in said
        if each["role"] in ("user", "assistant") and each.get("content")
    ]


async def main() -> None:
    base_url, directory, kind = sys.argv[1:]
    microphone = Microphone(Path(directory), piece_ms=20)
    turns = ThreeTurns(microphone)
    report: dict[str, Any] = {"calls": [], "delegations": [], "bot": [], "errors": []}

    async def lamp(params: FunctionCallParams, on: bool) -> None:
        """Turns the lamp on or off.

        Args:
            on: Whether it shall be on.
        """
        report["calls"].append({"on": on})
        await params.result_callback("done")

    key = os.environ["OPENAI_API_KEY"]
    if kind == "client":
        models = await AsyncOpenAI(base_url=base_url).models.list()
        settings = OpenAILLMService.Settings(model=models.data[0].id)
        helper = OpenAILLMService(api_key=key, base_url=base_url, settings=settings)
        backend = BackendLLMWorker(llm=helper, context=LLMContext([], [lamp]))
        context, delegation = LLMContext(), OpenAILiveLLMService.ClientDelegation(backend=backend)
    else:
        context = LLMContext([], [lamp])
        settings = OpenAIResponsesLLMService.Settings(model="gpt-5.4-mini")
        delegation = OpenAILiveLLMService.ResponsesDelegation(settings=settings)
    llm = OpenAILiveLLMService(
        api_key=key,
        base_url=f"{base_url.replace('http', 'ws', 1)}/live/sessions",
        settings=OpenAILiveLLMService.Settings(system_instruction="Be brief."),
        delegation=delegation,
    )
    aggregators = LLMContextAggregatorPair(context)
    before, behind = Witness(turns, report), Witness(turns, {"bot": []})
    steps = [Ear(microphone), aggregators.user(), before, llm, behind, Loudspeaker(), aggregators.assistant()]
    worker = PipelineWorker(Pipeline(steps))

    @worker.event_handler("on_pipeline_error")
    async def failed(_worker: PipelineWorker, frame: Any) -> None:
        report["errors"].append(frame.error)

    started = asyncio.Event()

    @llm.event_handler("on_session_started")
    async def begin(_llm: OpenAILiveLLMService, _session: Any) -> None:
        started.set()

    @llm.event_handler("on_delegation_created")
    async def delegated(_llm: OpenAILiveLLMService, created: Any) -> None:
        report["delegations"].append(created.target)

    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    await worker.queue_frame(LLMRunFrame())  # the session begins with the first context
    running = asyncio.create_task(runner.run())
    await started.wait()
    await turns.run()
    await worker.stop_when_done()
    await running
    print(json.dumps({**report, "texts": texts(context), "sound_s": turns.sound_s, "ahead_ms": turns.ahead_ms}))


logger.remove()
asyncio.run(main())
