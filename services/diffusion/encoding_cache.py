"""What encoders made of prompts and images, by content: a prompt that comes again is not encoded again.

Exact or not at all. A result is kept only if it can depend on nothing but what its key has: the arguments, what the
call so far set on its pipeline, and the adapters that are on. Callers get copies.
"""

import hashlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.utils.outputs import BaseOutput
from PIL import Image
from prometheus_client import Counter, Gauge

from services.diffusion.own import OwnPipeline

_METHODS = (("encode_prompt", "_encode_prompt"), ("encode_image", "_encode_image"))
"""Of pipelines; of each pair the first that there is, which calls the other."""
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)

CALLS = Counter(
    "quartet_encoding_cache_calls_total",
    "Calls of encoders: hit, its result was kept; miss, it is kept now; not_kept, it cannot be or is too large",
    ["stage", "method", "outcome"],
)
SIZE = Gauge("quartet_encoding_cache_bytes", "Encoded prompts and images that are kept", ["stage"])


class _NotExact(Exception):
    """It is not known whether a kept result would be what the call gives."""


class EncodingCache:
    """The latest results of `max_bytes` in all, on the device that made them. For one thread, without gradients.

    Args:
        stage: for metrics.
        max_bytes: of the results' tensors. A larger result is not kept.
    """

    def __init__(self, stage: str, max_bytes: int) -> None:
        self._stage, self._max_bytes = stage, max_bytes
        self._results: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()
        self._size_bytes = 0

    def attach(self, view: Any, adapters: Hashable) -> None:
        """Lets `view`, a pipeline for one call with models that others have too, take its encoders' results from here.

        Args:
            adapters: those that are on during the call, with their weights.
        """
        before = dict(vars(view))

        def state() -> dict[str, Any]:
            changed = {name: value for name, value in vars(view).items() if before.get(name, view) is not value}
            return {name: value for name, value in changed.items() if not inspect.isfunction(value)}  # those are ours

        if isinstance(view, OwnPipeline):  # what it keeps is finer than whole prompts

            def kept(name: str, key: Any, compute: Callable[[], Any]) -> Any:
                of = f"{type(view).__name__}.{name}", adapters
                return self._look_up(name, (of, key), compute, state)

            vars(view)["kept"] = kept
            return
        for names in _METHODS:
            name = next((name for name in names if hasattr(view, name)), None)
            if name is not None:
                key = f"{type(view).__name__}.{name}", adapters
                vars(view)[name] = self._cached(name, getattr(view, name), key, state)

    def attach_vae(self, vae: Any) -> None:
        """Has `vae.encode` look here first. Its result is a distribution, of which each call draws by its seed."""
        vae.encode = self._cached("vae.encode", vae.encode, ("vae.encode",), dict)

    def _cached(
        self, name: str, method: Callable[..., Any], of: Hashable, state: Callable[[], dict[str, Any]]
    ) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._look_up(name, (of, args, kwargs), lambda: method(*args, **kwargs), state)

        return call

    def _look_up(self, name: str, content: Any, compute: Callable[[], Any], state: Callable[[], dict[str, Any]]) -> Any:
        """What `compute` gives, or gave for equal `content`, in an equal `state`."""
        before = state()
        try:
            key = _digest((content, before))
        except _NotExact:
            self._count(name, "not_kept")
            return compute()
        if key in self._results:
            self._results.move_to_end(key)
            self._count(name, "hit")
            return _copied(self._results[key][0])
        chance = _chance()
        result = compute()
        is_pure = _is_same(before, state()) and torch.equal(chance, _chance())
        self._count(name, "miss" if is_pure and self._keep(key, result) else "not_kept")
        return result

    def _keep(self, key: bytes, result: Any) -> bool:
        if key in self._results:  # a pipeline of ours lets others go on while it reads, and they may read the same
            return True
        try:
            kept = _copied(result)
        except _NotExact:
            return False
        size_bytes = _size_bytes(kept)
        if size_bytes > self._max_bytes:
            return False
        self._results[key] = kept, size_bytes
        self._size_bytes += size_bytes
        while self._size_bytes > self._max_bytes:
            _, (_, freed_bytes) = self._results.popitem(last=False)
            self._size_bytes -= freed_bytes
        SIZE.labels(self._stage).set(self._size_bytes)
        return True

    def _count(self, method: str, outcome: str) -> None:
        CALLS.labels(self._stage, method.lstrip("_"), outcome).inc()


def _chance() -> torch.Tensor:
    """The state of torch's own random numbers: a method that draws gives something else each time."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return torch.cat(states)


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(other[name] is value for name, value in one.items())


def _digest(value: Any) -> bytes:
    digest = hashlib.blake2b()
    _feed(digest.update, value)
    return digest.digest()


def _feed(update: Callable[[bytes], object], value: Any) -> None:
    """Passes bytes that no other value has. Raises _NotExact: its kind is unknown."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        update(f"{kind.__name__} {value.dtype} {tuple(value.shape)} {value.device};".encode())
        update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        update(f"array {value.dtype.str} {value.shape};".encode())
        update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Image.Image) and value.palette is None:
        update(f"image {value.mode} {value.size};".encode())
        update(value.tobytes())
    elif isinstance(value, Mapping):
        update(f"{kind.__name__} {len(value)};".encode())
        for name, each in value.items():
            _feed(update, name)
            _feed(update, each)
    elif isinstance(value, list | tuple) and kind in (list, tuple):
        update(f"{kind.__name__} {len(value)};".encode())
        for each in value:
            _feed(update, each)
    elif isinstance(value, _PLAIN):
        update(f"{kind.__name__} {value!r};".encode())
    else:
        raise _NotExact


def _copied(value: Any) -> Any:
    """Shares no tensor with `value`. Raises _NotExact: its kind is unknown."""
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter):
        copied = value.detach().clone()
        if copied.stride() != value.stride():  # another kernel may read it, and round otherwise
            raise _NotExact
        return copied
    if kind in (list, tuple):
        return kind(_copied(each) for each in value)
    if kind is dict:
        return {name: _copied(each) for name, each in value.items()}
    if isinstance(value, BaseOutput):
        return kind(**{name: _copied(each) for name, each in value.items()})
    if kind is DiagonalGaussianDistribution:
        return kind(value.parameters.clone(), value.deterministic)
    if isinstance(value, _PLAIN):
        return value
    raise _NotExact


def _size_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, DiagonalGaussianDistribution):
        return sum(each.nbytes for each in (value.parameters, value.logvar, value.std, value.var))
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return 0
    return sum(_size_bytes(each) for each in value)
