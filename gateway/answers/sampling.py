"""A request's sampling as the stages take it."""

import json

from gateway.answers.extensions import StructuralTagFormat
from gateway.answers.gateway import Gateway
from gateway.answers.request import JsonObjectFormat, JsonSchemaFormat, WriterSampling
from gateway.pipeline.sampling import TalkerSampling
from quartet.v1 import talker_pb2, thinker_pb2


def sampling_of(
    gateway: Gateway, request: WriterSampling, max_tokens: int | None, top_logprobs: int | None
) -> thinker_pb2.SamplingParameters:
    """The thinker's sampling: the request's over the pipeline's.

    Args:
        max_tokens: wins over the request's own.
        top_logprobs: alternatives for each token; None: no log-probabilities.
    """
    assert gateway.pipeline.config.thinker is not None, "text was requested of a pipeline without a thinker"
    values = request.over(gateway.pipeline.config.thinker.sampling)
    if max_tokens is not None:
        values["max_tokens"] = max_tokens
    message = thinker_pb2.SamplingParameters(**values, stop=request.stop, logit_bias=request.logit_bias)
    if top_logprobs is not None:
        message.top_logprobs = top_logprobs
    match request.response_format:
        case JsonObjectFormat():
            message.json_object = True
        case JsonSchemaFormat(json_schema=schema):
            message.json_schema = json.dumps(schema.json_schema, ensure_ascii=False)
        case StructuralTagFormat() as tag:
            tag.fill(message)
    request.fill(message)
    return message


def talker_sampling(gateway: Gateway, requested: TalkerSampling, seed: int | None) -> talker_pb2.TalkerSampling:
    """The talker's sampling: the request's over the pipeline's. `seed` counts where `requested` has none."""
    assert gateway.pipeline.config.talker is not None, "speech was requested of a pipeline without a talker"
    sampling = talker_pb2.TalkerSampling(**requested.over(gateway.pipeline.config.talker.sampling))
    if not sampling.HasField("seed") and seed is not None:
        sampling.seed = seed
    return sampling
