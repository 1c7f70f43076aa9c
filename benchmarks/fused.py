"""The three engines in one process, without gRPC: rows, codes and samples go from one to the next in memory.

vLLM starts its engine core as a process of its own whichever way it is used, so that is a second process here too.
Every import that loads torch or vLLM waits for `Fused.start`, which sets what they read when they are imported.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING, Self

from answer import Answer
from client import PCM16_BYTES

if TYPE_CHECKING:
    import torch

    from services.code2wav.engine import DecodeEngine
    from services.talker.engine import TalkerEngine
    from services.talker.speech import Speech
    from services.thinker.engine import ThinkerEngine
    from services.thinker.plugin.shipping import ShippedRows
    from services.thinker.preprocess import Preprocessor


class Fused:
    """All engines, with the settings that the services have by default. Make it with `start`."""

    def __init__(
        self, thinker: ThinkerEngine, preprocessor: Preprocessor, talker: TalkerEngine, code2wav: DecodeEngine
    ) -> None:
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
        from services.talker.__main__ import start_engine as start_talker
        from services.talker.config import TalkerSettings
        from services.thinker.engine import ThinkerEngine
        from services.thinker.preprocess import Preprocessor

        thinker = await ThinkerEngine.start(settings)
        preprocessor = Preprocessor(settings, thinker.checkpoint, thinker.renderer, thinker.max_context_tokens)
        talker = await start_talker(TalkerSettings.load(["--model", model]))
        return cls(thinker, preprocessor, talker, start_code2wav(Code2WavSettings.load(["--model", model])))

    @property
    def sample_rate_hz(self) -> int:
        """Of the audio."""
        return self._code2wav.spec.sample_rate_hz

    async def close(self) -> None:
        """Stops all engines."""
        self._code2wav.stop()
        self._talker.close()
        self._preprocessor.close()
        await self._thinker.close()

    async def answer(self, prompt: str, tokens: int, frames: int) -> tuple[Answer, bytes]:
        """One greedy spoken answer and its PCM16 samples; the text is written while it is spoken."""
        answer = Answer(prompt, time.perf_counter(), 0.0)
        talk = _Talk(self._talker, frames)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._think(answer, talk, tokens))
            pcm16 = group.create_task(self._decode(answer, talk))
        answer.done_s = time.perf_counter()
        answer.frames = -(-answer.samples // self._code2wav.spec.samples_per_frame)
        return answer, pcm16.result()

    async def _think(self, answer: Answer, talk: _Talk, tokens: int) -> None:
        from quartet.v1 import thinker_pb2
        from services.talker.thinker_input import ROPE_POSITIONS
        from services.thinker.conversation import Conversation, Message
        from services.thinker.engine import Tap
        from services.thinker.sampling import sampling_params

        thinker = self._thinker
        prompt = await self._preprocessor.prepare(Conversation([Message("user", [answer.prompt])]))
        asked = thinker_pb2.SamplingParameters(temperature=0, max_tokens=tokens)
        params = sampling_params(asked, thinker.sampling_defaults, thinker.checkpoint.vocab_size, None)
        talk.begin(prompt.token_ids)
        positions = len(prompt.token_ids)
        wanted = {talk.hidden_states: prompt.multimodal, ROPE_POSITIONS: [(0, positions)]}  # as the talker service asks
        steps = thinker.generate(uuid.uuid4().hex, prompt, params, Tap(wanted, talk.take_rows))
        async with aclosing(steps):
            async for step in steps:
                if step.text:
                    answer.text += step.text
                    answer.text_s.append(time.perf_counter())
                answer.tokens += len(step.token_ids)
                talk.take_text(step.token_ids[:-1] if step.finish_reason == "stop" else step.token_ids)
        talk.finish_text()

    async def _decode(self, answer: Answer, talk: _Talk) -> bytes:
        from services.code2wav.frames import check_codes
        from services.code2wav.stream import Event, Failed, Samples

        code2wav, loop = self._code2wav, asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()
        stream = code2wav.open(lambda event: loop.call_soon_threadsafe(events.put_nowait, event), pcm16=True)

        async def feed() -> None:
            speech = await talk.speech
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
        if isinstance(event, Failed):
            raise event.error
        await feeding
        return pcm16


class _Talk:
    """What the thinker says, on its way into the talker: the speech starts as soon as its prompt and first text are
    there."""

    def __init__(self, talker: TalkerEngine, frames: int) -> None:
        from services.talker.thinker_input import ThinkerInput

        self.speech: asyncio.Future[Speech] = asyncio.get_running_loop().create_future()
        self._talker, self._frames = talker, frames
        self._input = ThinkerInput(talker.spec, text_ids=2**31)
        self.hidden_states = self._input.hidden_states
        self._position = 0

    def begin(self, token_ids: list[int]) -> None:
        """The prompt."""
        self._input.begin(len(token_ids))
        self.take_text(token_ids)

    def take_text(self, token_ids: list[int]) -> None:
        """The next tokens, first those of the prompt."""
        import torch

        from services.talker.thinker_input import TOKEN_IDS

        if token_ids:
            self._add(TOKEN_IDS, self._position, torch.tensor(token_ids))
            self._position += len(token_ids)

    def take_rows(self, rows: ShippedRows) -> None:
        """Hidden states or rope positions."""
        self._add(rows.name, rows.first_position, rows.rows)

    def finish_text(self) -> None:
        """The answer is complete."""
        self.speech.result().finish_text()

    def _add(self, name: str, first_position: int, rows: torch.Tensor) -> None:
        from services.talker.sampling import resolve
        from services.talker.speech import SpeechRequest

        self._input.add(name, first_position, rows)
        if self.speech.done():
            self.speech.result().feed(self._input.take_text())
        elif self._input.ready:
            spec = self._talker.spec
            sampling = resolve(spec.defaults, temperature=0, max_frames=self._frames)
            text = tuple(self._input.take_text())
            request = SpeechRequest(self._input.take_prompt(), text, next(iter(spec.speakers)), sampling)
            self.speech.set_result(self._talker.submit(request))
