"""Real replicas that come, drain and die under load."""

import asyncio
import signal
import subprocess
import sys
import uuid
from contextlib import aclosing
from pathlib import Path

import pytest

from cli.plan import PIPELINE
from gateway.pipeline.config import load_pipeline
from gateway.pipeline.events import Finished
from gateway.pipeline.pipeline import Pipeline
from gateway.pipeline.run import Job, run, speech
from quartet.v1 import talker_pb2, thinker_pb2
from services.common.errors import StageError, Unavailable
from services.common.rpc.channels import Channels
from tests.support.systems.stack import HANG_GUARD_S, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.weekly]

CLIENTS = 8


class Second:
    """A second replica of a stage, as a process."""

    def __init__(self, stage: str, checkpoint: Path, *flags: str) -> None:
        self.stage, self.address = stage, f"127.0.0.1:{free_port()}"
        port = self.address.rpartition(":")[2]
        self._command = [sys.executable, "-m", f"services.{stage}", "--model", str(checkpoint), "--port", port, *flags]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Clients:
    """Clients that ask for short spoken answers, one after another.

    Attributes:
        answers: how many they got.
        failures: why others failed.
    """

    def __init__(self, stages: Pipeline) -> None:
        self.answers, self.failures = 0, []
        self._stages = stages
        self._stop = False
        self._tasks = [asyncio.create_task(self._ask_on(number)) for number in range(CLIENTS)]

    async def stop(self) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)

    async def more(self, count: int) -> None:
        """Returns after so many more answers."""
        wanted = self.answers + count
        async with asyncio.timeout(HANG_GUARD_S):
            while self.answers < wanted:
                await asyncio.sleep(0.02)

    async def _ask_on(self, number: int) -> None:
        while not self._stop:
            start = thinker_pb2.GenerateStart(
                messages=[thinker_pb2.ChatMessage(role="user")],
                sampling=thinker_pb2.SamplingParameters(temperature=0, max_tokens=8),
            )
            start.messages[0].content.add(text=f"Client {number} asks.")
            speak = talker_pb2.SpeakStart(sampling=talker_pb2.TalkerSampling(seed=1, max_frames=8))
            job = Job(uuid.uuid4().hex, {"thinker": start, **speech(speak)})
            try:
                async with aclosing(run(self._stages, [job], HANG_GUARD_S)) as events:
                    last = [event async for _, event in events][-1]
                assert isinstance(last, Finished)
                self.answers += 1
            except StageError as failure:
                self.failures.append(failure)
                await asyncio.sleep(0.1)


async def test_stages_are_replaced_under_load_and_no_request_fails(stack, tiny_checkpoint):
    seconds = [Second(stage, tiny_checkpoint, *stack.access.stage_flags) for stage in ("talker", "code2wav")]
    addresses = stack.addresses | {second.stage: [stack.addresses[second.stage], second.address] for second in seconds}
    try:
        channels = Channels(stack.access.credentials)
        # a stage that stands still for seconds on a busy machine is not down
        async with Pipeline(load_pipeline(PIPELINE, addresses), 0.25, HANG_GUARD_S, channels=channels) as stages:
            replicas = {second: stages.by_name[second.stage].replicas[second.address] for second in seconds}

            async def until(serving: bool, *awaited: Second) -> None:
                async with asyncio.timeout(300):
                    while any(replicas[second].serving is not serving for second in awaited):
                        await asyncio.sleep(0.02)

            await until(True, *seconds)
            clients = Clients(stages)
            await clients.more(2 * CLIENTS)
            assert all(replica.last_chosen for replica in replicas.values())  # both are used
            for second in seconds:
                second.process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(second.process.wait, HANG_GUARD_S) == 0
                await clients.more(CLIENTS)
                second.start()
                await until(True, second)
                chosen = replicas[second].last_chosen
                await clients.more(2 * CLIENTS)
                assert replicas[second].last_chosen > chosen  # it takes traffic again
            assert clients.failures == []
            for second in seconds:
                second.kill()
                await until(False, second)
                await clients.more(2 * CLIENTS)
            await clients.stop()
            # only what had been heard in part may fail, at most what was in flight when they died, and with a type
            assert len(clients.failures) <= 2 * CLIENTS
            assert all(isinstance(failure, Unavailable) for failure in clients.failures)
    finally:
        for second in seconds:
            second.kill()
