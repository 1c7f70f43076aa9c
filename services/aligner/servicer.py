"""quartet.v1.AlignerService: sounds and texts in, words with times out; and its start-up."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np

from quartet.v1 import aligner_pb2, aligner_pb2_grpc, server_info_pb2
from services.aligner.config import AlignerSettings
from services.aligner.engine import AlignerEngine, load_engine
from services.aligner.family import RATE_HZ, Sound, WordTimes
from services.aligner.words import places
from services.common.errors import require
from services.common.rpc.call import Admission, serve_call
from services.common.stage import Stage

SERVICE_NAME = aligner_pb2.DESCRIPTOR.services_by_name["AlignerService"].full_name
_CHARACTERS_OF_WORD = 32  # of a text, for each word that a request may have, before it is split


class AlignerServicer(aligner_pb2_grpc.AlignerServiceServicer):
    """Serves requests by `engine`, which is set once it is loaded, before `admission` opens."""

    def __init__(self, admission: Admission, settings: AlignerSettings) -> None:
        self._admission, self._settings = admission, settings
        self._texts = ThreadPoolExecutor(1, "text")
        self.engine: AlignerEngine

    def close(self) -> None:
        self._texts.shutdown(wait=False, cancel_futures=True)

    @property
    def max_audio_s(self) -> float:
        return min(self.engine.model.max_audio_s, self._settings.max_audio_s or self.engine.model.max_audio_s)

    async def Align(
        self, request: aligner_pb2.AlignRequest, context: grpc.aio.ServicerContext
    ) -> aligner_pb2.AlignResponse:
        async with serve_call("aligner", request.request_id, context, self._admission) as call:
            self._check(request)
            loop = asyncio.get_running_loop()
            words = await loop.run_in_executor(self._texts, self.engine.model.split, request.text, request.language)
            most = self._settings.max_words
            require(
                len(words) <= most, "text", f"has {len(words)} words; at most {most} are given times in one request"
            )
            samples = np.frombuffer(request.pcm16, "<i2").astype(np.float32) / 32768
            call.set(words=len(words), audio_s=round(len(samples) / RATE_HZ, 3))
            call.timings.mark_started()
            times = await self.engine.align(Sound(samples, words, request.language))
            call.timings.mark_output()
            found = [
                _word(word, place, each)
                for word, place, each in zip(words, places(request.text, words), times, strict=True)
            ]
            return aligner_pb2.AlignResponse(words=found, timings=call.timings.to_message())
        raise AssertionError("serve_call ends the call of an error")

    def _check(self, request: aligner_pb2.AlignRequest) -> None:
        """Raises InvalidInput."""
        size, known = len(request.pcm16), self.engine.model.languages
        require(
            size and size % 2 == 0, "pcm16", f"must be whole samples of 2 bytes, and at least one; has {size} bytes"
        )
        audio_s = size / 2 / RATE_HZ
        most = f"must be at most {self.max_audio_s:g} s; has {audio_s:.1f} s: send it in pieces, each with its words"
        require(audio_s <= self.max_audio_s, "pcm16", most)
        most_characters = _CHARACTERS_OF_WORD * self._settings.max_words
        too_long = f"has {len(request.text)} characters; at most {most_characters} are read"
        require(len(request.text) <= most_characters, "text", too_long)
        unknown = f"{request.language!r} is none that this model gives times for: {', '.join(known)}"
        require(not request.language or not known or request.language in known, "language", unknown)


def _word(word: str, place: tuple[int, int], times: WordTimes) -> aligner_pb2.AlignedWord:
    return aligner_pb2.AlignedWord(
        word=word, text_begin=place[0], text_end=place[1], begin_ms=times.begin_ms, end_ms=times.end_ms
    )


async def serve(stage: Stage, settings: AlignerSettings) -> None:
    """Runs the stage until it is told to stop."""
    servicer = AlignerServicer(stage.admission, settings)
    aligner_pb2_grpc.add_AlignerServiceServicer_to_server(servicer, stage.grpc)
    stage.resources.callback(servicer.close)

    async def start() -> server_info_pb2.GetServerInfoResponse:
        servicer.engine = engine = await stage.load(asyncio.to_thread(load_engine, settings))
        stage.resources.callback(engine.close)
        model = engine.model
        await engine.align(Sound(np.zeros(RATE_HZ, np.float32), ["warm", "up"]))
        info = server_info_pb2.AlignerInfo(
            max_audio_s=servicer.max_audio_s,
            max_words=settings.max_words,
            languages=model.languages,
            resolution_ms=model.resolution_ms,
        )
        limits = ("max_audio_s", "max_words")
        return stage.describe(str(model.dtype), str(model.device), volatile=limits, aligner=info)

    await stage.serve(start)
