"""SamplingParameters of a request as vLLM's SamplingParams."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quartet.v1 import thinker_pb2
from services.common.rpc.errors import InvalidInput

if TYPE_CHECKING:
    from vllm import SamplingParams

MAX_STOP_STRINGS = 16
MAX_TOP_LOGPROBS = 20

# field: (least, most, whether the least is allowed, in words)
_RANGES: dict[str, tuple[float, float, bool, str]] = {
    "temperature": (0, 2, True, "0 to 2"),
    "top_p": (0, 1, False, "above 0 and at most 1"),
    "min_p": (0, 1, True, "0 to 1"),
    "presence_penalty": (-2, 2, True, "-2 to 2"),
    "frequency_penalty": (-2, 2, True, "-2 to 2"),
    "repetition_penalty": (0, float("inf"), False, "above 0"),
    "top_k": (-1, 2**31 - 1, True, "-1 or more"),
    "max_tokens": (1, 2**31 - 1, True, "1 or more"),
    "min_tokens": (0, 2**31 - 1, True, "0 or more"),
    "top_logprobs": (0, MAX_TOP_LOGPROBS, True, f"0 to {MAX_TOP_LOGPROBS}"),
}


def sampling_params(
    request: thinker_pb2.SamplingParameters, defaults: Mapping[str, Any], vocab_size: int, output_schema: str | None
) -> "SamplingParams":
    """vLLM's parameters for `request`.

    Args:
        request: what the caller set.
        defaults: the checkpoint's generation_config, by vLLM's names; used where the request is silent.
        vocab_size: token ids are below it.
        output_schema: JSON schema that the choice of tools imposes, if any.

    Raises:
        InvalidInput: names the field, e.g. "sampling.top_p".
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    _check(request, vocab_size)
    values: dict[str, Any] = {"max_tokens": None, **defaults}
    for name in _RANGES:
        if name != "top_logprobs" and request.HasField(name):
            values[name] = getattr(request, name)
    if request.HasField("seed"):
        values["seed"] = request.seed % 2**63  # vLLM takes -1 for "no seed"
    if request.HasField("top_logprobs"):
        values["logprobs"] = request.top_logprobs
    if request.HasField("ignore_eos"):
        values["ignore_eos"] = request.ignore_eos
    if request.logit_bias:
        values["logit_bias"] = dict(request.logit_bias)
    return SamplingParams(
        **values,
        stop=list(request.stop),
        stop_token_ids=list(request.stop_token_ids),
        structured_outputs=_structure(request, output_schema),
        output_kind=RequestOutputKind.DELTA,
    )


def _check(request: thinker_pb2.SamplingParameters, vocab_size: int) -> None:
    for name, (least, most, inclusive, words) in _RANGES.items():
        if not request.HasField(name):  # pyright: ignore[reportArgumentType]
            continue
        value = getattr(request, name)
        if not (least <= value <= most and value < float("inf") and (inclusive or value > least)):
            raise InvalidInput(f"sampling.{name}", f"must be {words}, not {value:g}")
    if request.HasField("max_tokens") and request.min_tokens > request.max_tokens:
        raise InvalidInput("sampling.min_tokens", f"must be at most max_tokens, {request.max_tokens}")
    if len(request.stop) > MAX_STOP_STRINGS:
        raise InvalidInput("sampling.stop", f"has {len(request.stop)} strings; at most {MAX_STOP_STRINGS} are taken")
    if not all(request.stop):
        raise InvalidInput("sampling.stop", "must not contain an empty string")
    for name, ids in (("stop_token_ids", request.stop_token_ids), ("logit_bias", request.logit_bias)):
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidInput(f"sampling.{name}", f"token ids must be 0 to {vocab_size - 1}, not {token_id}")
    for token_id, bias in request.logit_bias.items():
        if not -100 <= bias <= 100:
            raise InvalidInput("sampling.logit_bias", f"of token {token_id} must be -100 to 100, not {bias:g}")


def _structure(request: thinker_pb2.SamplingParameters, output_schema: str | None) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    kind = request.WhichOneof("structure")
    if output_schema is not None:
        if kind is not None:
            raise InvalidInput(f"sampling.{kind}", "cannot be combined with a tool_choice that forces a call")
        return StructuredOutputsParams(json=output_schema)
    if kind == "json_schema":
        check_json_object("sampling.json_schema", request.json_schema)
        return StructuredOutputsParams(json=request.json_schema)
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True) if request.json_object else None
    if kind == "regex":
        return StructuredOutputsParams(regex=request.regex)
    if kind == "grammar":
        return StructuredOutputsParams(grammar=request.grammar)
    return None


def check_json_object(field: str, text: str) -> dict[str, Any]:
    """The JSON object in `text`.

    Raises:
        InvalidInput: names `field`, when it is none.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(field, f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidInput(field, "must be a JSON object")
    return value
