"""An embedder whose embeddings and scores tell what it was sent."""

import numpy as np

from quartet.v1 import embedder_pb2, embedder_pb2_grpc, server_info_pb2, tensor_pb2
from tests.support.scripted.script import TIMINGS, Script

DIMENSIONS, MOST_INPUTS = 4, 6
EMBEDDINGS = server_info_pb2.EmbedderInfo(
    embeds=True,
    dimensions=DIMENSIONS,
    max_input_tokens=16,
    pooling="mean",
    normalizes=True,
    max_inputs=MOST_INPUTS,
    max_request_tokens=100,
)
SCORES = server_info_pb2.EmbedderInfo(
    scores=True, max_input_tokens=16, pooling="cls", max_inputs=MOST_INPUTS, max_request_tokens=100
)


def embedding(index: int, tokens: int, dimensions: int = DIMENSIONS) -> list[float]:
    """Of the input `index`."""
    return [float(index), float(tokens), 0.1, -0.5][:dimensions]


class Embedder(embedder_pb2_grpc.EmbedderServiceServicer):
    """A token for each character. The last input is ready first. A document's score is the part of its characters that
    the query has."""

    def __init__(self, script: Script) -> None:
        self.script = script

    async def Embed(self, request, context):
        counts = [len(each.text) or len(each.token_ids.ids) for each in request.inputs]
        outputs = []
        for i, tokens in reversed(list(enumerate(counts))):
            values = np.array(embedding(i, tokens, request.dimensions or DIMENSIONS), "<f4")
            tensor = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=values.shape, inline=values.tobytes())
            made = embedder_pb2.Embedding(index=i, tokens=tokens, values=tensor)
            outputs.append(embedder_pb2.EmbedResponse(embedding=made))
        summary = embedder_pb2.EmbedSummary(inputs=len(counts), prompt_tokens=sum(counts), timings=TIMINGS)
        async for output in self.script.play(request, [*outputs, embedder_pb2.EmbedResponse(summary=summary)], context):
            yield output

    async def Score(self, request, context):
        queries = list(request.queries) * (1 if len(request.queries) > 1 else len(request.documents))
        pairs = list(zip(queries, request.documents, strict=True))
        outputs = []
        for i, (query, document) in reversed(list(enumerate(pairs))):
            score = sum(letter in query for letter in document) / max(1, len(document))
            made = embedder_pb2.PairScore(index=i, tokens=len(query) + len(document), score=score)
            outputs.append(embedder_pb2.ScoreResponse(score=made))
        tokens = sum(len(query) + len(document) for query, document in pairs)
        summary = embedder_pb2.ScoreSummary(pairs=len(pairs), prompt_tokens=tokens, timings=TIMINGS)
        async for output in self.script.play(request, [*outputs, embedder_pb2.ScoreResponse(summary=summary)], context):
            yield output
