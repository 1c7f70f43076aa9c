"""The three engines in one process, without gRPC: rows, codes and samples go from one to the next in memory.

vLLM starts its engine core as a process of its own whichever way it is used, so that is a second process here too.
Every import that loads torch or vLLM waits for `Fused.start`, which sets what they read when they are imported.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Self

from benchmarks.traffic.answer import Answer
from benchmarks.traffic.client import PCM16_BYTES

if TYPE_CHECKING:
    import torch

    from services.code2wav.engine import DecodeEngine
    from services.common.stream.rows import Rows
    from services.talker.engine import TalkerEngine
    from services.talker.family import TalkerFamily
    from services.talker.speech import Speech
    from services.thinker.engine import ThinkerEngine
    from services.thinker.preprocess import Preprocessor


class Fused:
    """All engines, with the settings that the services have by default. Make it with `start`."""

    def __init__(
        self,
        thinker: ThinkerEngine,
        preprocessor: Preprocessor,
        family: TalkerFamily,
        talker: TalkerEngine,
        code2wav: DecodeEngine,
    ) -> None:
        self._family = family
        self._thinker, self._preprocessor, self._talker, self._code2wav = thinker, preprocessor, talker, code2wav

    @classmethod
    async def start(cls, model: str) -> Self:
        """Loads everything from the checkpoint directory `model`."""
        from services.thinker import environment
        from services.thinker.config import ThinkerSettings

        settings = ThinkerSettings.load(["--model", model])
        environment.configure(settings)

        from services.code2wav.__main__ import start_engine as start_code2wav
        from services.code2wav.config import Code2WavSettings
        from services.common.media.decoders import Decoders
        from services.talker.__main__ import load as load_talker
        from services.talker.config import TalkerSettings
        from services.talker.engine import TalkerEngine
        from services.thinker.engine import ThinkerEngine
        from services.thinker.preprocess import Preprocessor

        thinker = await ThinkerEngine.start(settings)
        decoders = Decoders(settings.decoding_memory_bytes, settings.max_decoding_s)
        preprocessor = Preprocessor(settings, thinker, decoders)
        family, runner = await asyncio.to_thread(load_talker, TalkerSettings.load(["--model", model]))
        talker = TalkerEngine(runner)
        return cls(thinker, preprocessor, family, talker, start_code2wav(Code2WavSettings.load(["--model", model])))

    @property
    def sample_rate_hz(self) -> int:
        """Of the audio."""
        return self._code2wav.spec.sample_rate_hz

    async def close(self) -> None:
        """Stops all engines."""
        self._code2wav.stop()
        self._talker.stop()
        self._preprocessor.close()
        await self._thinker.close()

    async def answer(self, prompt: str, tokens: int, frames: int) -> tuple[Answer, bytes]:
        """One greedy spoken answer and its PCM16 samples; the text is written while it is spoken."""
        answer = Answer(prompt, time.perf_counter(), 0.0)
        speech = _SpeechInput(self._family, self._talker, frames)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._think(answer, speech, tokens))
            pcm16 = group.create_task(self._decode(answer, speech))
        answer.done_s = time.perf_counter()
        answer.frames = -(-answer.samples // self._code2wav.spec.samples_per_frame)
        return answer, pcm16.result()

    async def _think(self, answer: Answer, speech: _SpeechInput, tokens: int) -> None:
        from quartet.v1 import thinker_pb2
        from services.thinker.conversation import Conversation, Message
        from services.thinker.engine import RowSubscription
        from services.thinker.request import sampling_params

        thinker = self._thinker
        text: Any = answer.prompt
        prompt = await self._preprocessor.prepare(Conversation([Message("user", [text])]))
        asked = thinker_pb2.SamplingParameters(temperature=0, max_tokens=tokens)
        params = sampling_params(asked, thinker.sampling_defaults, thinker.checkpoint.vocab_size, None)
        speech.begin(prompt.token_ids)
        positions = len(prompt.token_ids)
        wanted = speech.wanted(positions, prompt.multimodal)
        steps = thinker.generate(uuid.uuid4().hex, prompt, params, RowSubscription(wanted, speech.take_rows))
        async with aclosing(steps):
            async for step in steps:
                if step.text:
                    answer.text += step.text
                    answer.text_s.append(time.perf_counter())
                answer.tokens += len(step.token_ids)
                speech.take_text(step.token_ids[:-1] if step.finish_reason == "stop" else step.token_ids)
        speech.finish_text()

    async def _decode(self, answer: Answer, speech_input: _SpeechInput) -> bytes:
        from services.code2wav.servicer import check_codes
        from services.code2wav.stream import Event, Samples

        code2wav, loop = self._code2wav, asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()
        stream = code2wav.open(lambda event: loop.call_soon_threadsafe(events.put_nowait, event), pcm16=True)

        async def feed() -> None:
            speech = await speech_input.speech
            async with aclosing(speech.frames()) as ready:
                async for codes in ready:
                    code2wav.put(stream, check_codes(code2wav.spec, codes, "codes"))
            code2wav.finish(stream)

        feeding = asyncio.create_task(feed())
        pcm16 = b""
        while isinstance(event := await events.get(), Samples):
            if len(event.samples):
                piece = event.samples.numpy().tobytes()
                answer.audio.append((time.perf_counter(), len(piece) // PCM16_BYTES))
                pcm16 += piece
        if isinstance(event, Exception):
            raise event
        await feeding
        return pcm16


class _SpeechInput:
    """What the thinker says, on its way into the talker: the speech starts as soon as its prompt and first text are
    there."""

    def __init__(self, family: TalkerFamily, talker: TalkerEngine, frames: int) -> None:
        self.speech: asyncio.Future[Speech] = asyncio.get_running_loop().create_future()
        self._spec, self._talker, self._frames = family.spec, talker, frames
        assert family.thinker_input is not None
        self._input = family.thinker_input(family.spec.speakers[0])
        self._position = 0

    def wanted(self, positions: int, multimodal: list[tuple[int, int]]) -> dict[str, list[tuple[int, int]]]:
        """Name of each kind of rows -> those of a prompt of `positions` that the talker service requests."""
        from quartet.v1 import stream_pb2

        ranges = {
            stream_pb2.POSITIONS_PROMPT: [(0, positions)],
            stream_pb2.POSITIONS_PROMPT_MULTIMODAL: multimodal,
        }
        return {row.name: ranges[row.positions] for row in self._input.wanted if row.name != "token_ids"}

    def begin(self, token_ids: list[int]) -> None:
        """The prompt."""
        self._input.begin(len(token_ids))
        self.take_text(token_ids)

    def take_text(self, token_ids: list[int]) -> None:
        """The next tokens, first those of the prompt."""
        import torch

        if token_ids:
            self._add("token_ids", self._position, torch.tensor(token_ids))
            self._position += len(token_ids)

    def take_rows(self, rows: Rows) -> None:
        """Hidden states or rope positions."""
        self._add(rows.name, rows.first_position, rows.tensor)

    def finish_text(self) -> None:
        """The answer is complete."""
        self.speech.result().finish_text()

    def _add(self, name: str, first_position: int, rows: torch.Tensor) -> None:
        from services.common.stream.rows import Rows
        from services.talker.sampling import resolve
        from services.talker.speech import SpeechRequest

        self._input.add(Rows(name, first_position, rows))
        if self.speech.done():
            self.speech.result().feed(self._input.take_text())
        elif self._input.ready:
            sampling = resolve(self._spec.defaults, temperature=0, max_frames=self._frames)
            request = SpeechRequest(self._input.take_prompt(), self._input.take_text(), sampling)
            self.speech.set_result(self._talker.submit(request))
