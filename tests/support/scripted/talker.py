"""A talker of three frames."""

import asyncio
from contextlib import aclosing

import numpy as np

from quartet.v1 import stream_pb2, talker_pb2, talker_pb2_grpc, tensor_pb2
from tests.support.scripted.script import TIMINGS, Script

CODES = [[1, 2], [3, 4], [5, 6]]  # frames of the talker
VOICES = ["chelsie", "ethan"]


class Talker(talker_pb2_grpc.TalkerServiceServicer):
    def __init__(self, script: Script) -> None:
        self.script = script

    async def Speak(self, request_iterator, context):
        request = (await anext(request_iterator)).start
        end = talker_pb2.SPEECH_END_STOP
        summary = talker_pb2.SpeakSummary(frames=3, end=end, timings=TIMINGS, text_tokens=4)
        outputs = [talker_pb2.SpeakResponse(started=talker_pb2.SpeakStarted(speaker=request.speaker))]
        if request.wants_frames or not request.output_stream_id:
            outputs += [talker_pb2.SpeakResponse(frames=_codes(first, end)) for first, end in ((0, 2), (2, len(CODES)))]
        outputs.append(talker_pb2.SpeakResponse(summary=summary))

        async def listen() -> None:
            async for more in request_iterator:
                self.script.typed.append(more.text)

        listening = asyncio.create_task(listen())
        try:
            async with aclosing(self.script.play(request, outputs, context)) as played:
                async for output in played:
                    if output.HasField("summary"):
                        await listening
                    yield output
        finally:
            listening.cancel()


def _codes(first: int, end: int) -> stream_pb2.Rows:
    codes = np.array(CODES[first:end], np.int32)
    tensor = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_INT32, shape=codes.shape, inline=codes.tobytes())
    return stream_pb2.Rows(name="codes", first_position=first, tensor=tensor)
