"""An encoder that has read every prompt."""

from quartet.v1 import encoder_pb2, encoder_pb2_grpc
from tests.support.scripted.script import TIMINGS, Script


class Encoder(encoder_pb2_grpc.EncoderServiceServicer):
    """Reads prompts for a dit; has no streams, as the scripted dit subscribes to none."""

    def __init__(self, script: Script) -> None:
        self.script = script

    async def Encode(self, request_iterator, context):
        start = (await anext(request_iterator)).start
        outputs = [encoder_pb2.EncodeResponse(summary=encoder_pb2.EncodeSummary(timings=TIMINGS))]
        async for output in self.script.play(start, outputs, context):
            yield output
