"""An aligner that gives each word of a text a tenth of a second, one after another from the first sample."""

from quartet.v1 import aligner_pb2, aligner_pb2_grpc, server_info_pb2
from tests.support.scripted.script import TIMINGS, Script

WORD_MS = 100
ALIGNS = server_info_pb2.AlignerInfo(max_audio_s=60, max_words=100, languages=["en", "de"], resolution_ms=10)


class Aligner(aligner_pb2_grpc.AlignerServiceServicer):
    def __init__(self, script: Script) -> None:
        self.script = script

    async def Align(self, request, context):
        words, at = [], 0
        for i, word in enumerate(request.text.split()):
            begin = request.text.index(word, at)
            at = begin + len(word)
            said = aligner_pb2.AlignedWord(word=word, text_begin=begin, text_end=at)
            said.begin_ms, said.end_ms = WORD_MS * i, WORD_MS * (i + 1)
            words.append(said)
        told = aligner_pb2.AlignResponse(words=words, timings=TIMINGS)
        return [each async for each in self.script.play(request, [told], context)][-1]
