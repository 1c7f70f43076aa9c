"""Embeddings of texts and scores of pairs of texts: what all their requests share."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.answers.gateway import Gateway
from gateway.answers.meter import Meter
from gateway.answers.prompt_messages import refuse_large
from gateway.errors import in_own_terms, invalid
from gateway.pipeline.embedder import Results, results
from gateway.validation import Strict
from quartet.v1 import embedder_pb2, server_info_pb2


class InputMembers(Strict):
    """Of all requests that an embedder reads."""

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        default=None, description="a longer input is cut to so many tokens; -1: to what fits the model"
    )
    truncation_side: Literal["left", "right"] | None = Field(default=None, description="that is cut off")
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = Field(
        default=None, description="the lower is served first"
    )

    def fill(self, request: embedder_pb2.EmbedRequest | embedder_pb2.ScoreRequest) -> None:
        if self.truncate_prompt_tokens is not None:
            request.truncate_tokens = self.truncate_prompt_tokens
        if self.truncation_side is not None:
            request.truncation_side = f"TRUNCATION_SIDE_{self.truncation_side.upper()}"  # pyright: ignore
        request.priority = self.priority or 0


def embedder_info(gateway: Gateway, model: str | None, output: Literal["embedding", "scores"]) -> Any:
    """EmbedderInfo of the stage that makes `output` for a request that asks for `model`. Raises ApiError."""
    stage = gateway.catalog.stage_for(output, gateway.catalog.meant(model, output))
    with in_own_terms(kind="embedder"):
        stage.require_serving()
    assert stage.info is not None
    info = stage.info.embedder
    if not (info.embeds if output == "embedding" else info.scores):
        does = "scores pairs of texts" if info.scores else "makes embeddings"
        name = gateway.catalog.model_of(stage)
        raise invalid("model", f"{name!r} {does}; a server for {output} needs another model", "unsupported_model")
    return info


def check_count(count: int, field: str, info: server_info_pb2.EmbedderInfo) -> None:
    """Raises ApiError: 400 naming `field`, of which there are none or too many."""
    if not count:
        raise invalid(field, "is empty; send at least one")
    if count > info.max_inputs:
        raise invalid(field, f"has {count} items; at most {info.max_inputs} are taken in one request")


async def make(
    gateway: Gateway,
    request: embedder_pb2.EmbedRequest | embedder_pb2.ScoreRequest,
    meter: Meter,
    field: str,
    own_name: Callable[[str], str] = str,
) -> Results:
    """What the embedder makes of `request`. Cancelling ends its work.

    Args:
        field: the texts in the client's request.
        own_name: its name of what a request with a list of texts has.

    Raises:
        ApiError: 400 naming the member at fault, or an embedder that does not answer.
    """
    pairs = isinstance(request, embedder_pb2.ScoreRequest)
    refuse_large(request, field)
    request.request_id = meter.request_id
    stage = gateway.pipeline.output("scores" if pairs else "embedding")
    assert stage is not None
    with in_own_terms(own_name, "embedder"):
        made = await results(stage, request, meter.left_s)
    meter.count_embedded(len(made.values), made.prompt_tokens)
    return made
