"""Further arguments of a pipeline's call, as requests name them."""

import json
import re
import types
from collections.abc import Iterator, Mapping
from functools import cache
from inspect import Parameter
from typing import Any, Union, get_args, get_origin

from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from services.common.errors import InvalidInput
from services.diffusion.found import CONTEXT, FRAMES, LABELS, SECONDS, default_of, guidance_of, parameters_of

FIELD = "arguments"
MAX_CHARACTERS = 65_536
_MAX_INTEGER = 8192  # beyond the default's own: sizes and counts cost memory
_OF_REQUESTS = {
    "prompt",
    CONTEXT,
    LABELS,
    "negative_prompt",
    "height",
    "width",
    "num_inference_steps",
    *FRAMES,
    *SECONDS,
}
# What an output is made with, which steps it has, how many there are, and whether they are checked is the engine's to
# know.
_OF_THE_ENGINE = re.compile(
    r"generator|output_type|return_dict|callback.*|timesteps|sigmas|num_\w+_per_prompt|batch_size|\w*safety_check\w*"
)
_NAMES_A_FILE = re.compile(r"image|video|audio|mask|path|url|file")


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


@cache
def offered(cls: type[DiffusionPipeline]) -> dict[str, tuple[Any, Any]]:
    """Name -> (type, default) of the arguments that JSON can say and that no field of a request has.

    A text may have the default `...`: each request must say it.
    """
    found, reserved = {}, {*_OF_REQUESTS, guidance_of(cls)}
    for name, parameter in parameters_of(cls).items():
        default, kind = parameter.default, _plain(parameter.annotation)
        if kind is None or name in reserved or _OF_THE_ENGINE.fullmatch(name):
            continue
        if default is Parameter.empty:
            found |= {name: (str, ...)} if kind is str else {}
            continue
        if not (_NAMES_A_FILE.search(name) and str in _parts(kind)):
            found[name] = (kind if default is not None else kind | None, default)
    return found


def needed_texts(cls: type[DiffusionPipeline]) -> list[str]:
    """Arguments that each request must say."""
    return [name for name, (_, default) in offered(cls).items() if default is ...]


@cache
def _model(cls: type[DiffusionPipeline]) -> type[BaseModel]:
    return create_model("Arguments", __base__=_Arguments, **offered(cls))  # type: ignore[call-overload]


def _plain(kind: Any) -> Any:
    """What JSON can say of a type, None: nothing."""
    if kind in (bool, int, float, str):
        return kind
    parts = get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        plain = tuple(each for part in parts if (each := _plain(part)) is not None)
        return Union[*plain, *((None,) if type(None) in parts else ())] if plain else None
    if get_origin(kind) in (list, tuple) and all(part is ... or _plain(part) is not None for part in parts):
        return kind
    return None


def _parts(kind: Any) -> Iterator[Any]:
    yield kind
    for part in get_args(kind):
        yield from _parts(part)


def parse(text: str, cls: type[DiffusionPipeline], max_steps: int) -> dict[str, Any]:
    """The arguments that a JSON object says, of their types.

    Args:
        max_steps: most that an argument for steps may say.

    Raises:
        InvalidInput: names the argument.
    """
    if not text:
        if needed := needed_texts(cls):
            raise InvalidInput(f"{FIELD}.{needed[0]}", f"is required by {cls.__name__}: a text")
        return {}
    if len(text) > MAX_CHARACTERS:
        raise InvalidInput(FIELD, f"has {len(text)} characters; at most {MAX_CHARACTERS} are read")
    known = offered(cls)
    try:
        values = _model(cls).model_validate_json(text).model_dump(exclude_unset=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _refusal(first["loc"], first["type"], first["msg"], cls, known) from None
    for name, value in values.items():
        _check_numbers(name, value, cls, max_steps)
    return values


def _refusal(
    where: tuple[int | str, ...], kind: str, message: str, cls: type, known: Mapping[str, tuple[Any, Any]]
) -> InvalidInput:
    if not where:
        return InvalidInput(FIELD, f"must be a JSON object: {message}")
    field = f"{FIELD}.{where[0]}"
    if kind != "extra_forbidden":
        return InvalidInput(field, f"must be {name_of(known[str(where[0])][0])}: {message}")
    if where[0] in parameters_of(cls):
        return InvalidInput(
            field, "is not taken here: the request has a field for it, the engine sets it, or it is no JSON"
        )
    return InvalidInput(field, f"{cls.__name__} takes none; it takes {', '.join(known) or 'nothing further'}")


def _check_numbers(name: str, value: Any, cls: type[DiffusionPipeline], max_steps: int) -> None:
    """Refuses what would cost without bound."""
    default = default_of(cls, name)
    most = max(_MAX_INTEGER, default if isinstance(default, int) else 0)
    if name.endswith("steps"):
        most = max_steps
    if name == "max_sequence_length" and isinstance(default, int):
        most = default
    for number in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(number, int) and abs(number) > most:
            raise InvalidInput(f"{FIELD}.{name}", f"must be at most {most}")


def name_of(kind: Any) -> str:
    """A type as people write it."""
    if kind is type(None):
        return "None"
    if get_origin(kind) in (Union, types.UnionType):
        return " | ".join(map(name_of, get_args(kind)))
    return str(kind) if get_args(kind) else kind.__name__


def described(cls: type[DiffusionPipeline]) -> Iterator[dict[str, str]]:
    """Fields of DitArgument, of each."""
    for name, (kind, default) in offered(cls).items():
        yield {"name": name, "type": name_of(kind), "default": "" if default is ... else json.dumps(default)}
