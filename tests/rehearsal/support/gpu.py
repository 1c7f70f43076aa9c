"""A GPU that is not there: tensors on the CPU are real, those on "cuda" have shapes but no values.

What comes back from the device is zeros, and is noted. Everything on the device goes through torch's own fake kernels,
which raise on wrong shapes, dtypes and devices as CUDA would.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.rehearsal.support.guard import load_guard
from tests.rehearsal.support.kernels import CONVOLUTIONS, FREE, PRODUCTS, WHOLE, attention_path, check_varlen, cost
from tests.rehearsal.support.ledger import Kind, Ledger, Work
from tests.rehearsal.support.stubs import H100, Machine, Properties, stubbed

_READS = frozenset({"item", "_local_scalar_dense", "is_nonzero", "equal", "allclose"})
_SIZES_BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
_MASKS = (torch.bool, torch.uint8)


@contextmanager
def fake_gpu(properties: Properties = H100, devices: int = 1) -> Iterator["FakeGpu"]:
    """`devices` fake GPUs, for this thread and those that start meanwhile. Device 0 is current in each thread."""
    load_guard()
    with stubbed(Machine(properties, devices)) as machine:
        gpu = FakeGpu(machine, Ledger())
        machine.on_capture, machine.on_use = gpu.capture, gpu.used
        with machine.in_threads(lambda: FakeGpu(machine, gpu.ledger, gpu.fake)), gpu:
            yield gpu


class FakeGpu(TorchDispatchMode):
    """One thread's part. All share `ledger` and `fake`, torch's mode with the device's tensors."""

    def __init__(self, machine: Machine, ledger: Ledger, fake: FakeTensorMode | None = None) -> None:
        super().__init__()
        self._machine, self.ledger = machine, ledger
        self.fake = fake or FakeTensorMode(allow_non_fake_inputs=True)

    def used(self, kind: str, device: int) -> None:
        self.ledger.devices[kind, device] += 1
        if device != self._machine.current:
            self.ledger.note(
                Kind.WRONG_DEVICE, f"{kind} of cuda:{device} while cuda:{self._machine.current} is current"
            )

    @contextmanager
    def capture(self) -> Iterator[None]:
        work, self.ledger.work = self.ledger.work, Work()
        try:
            yield
        finally:
            self.ledger.captures.append(self.ledger.work)
            self.ledger.work = work

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options, name = dict(kwargs or {}), func._opname
        if func.namespace == "prim":  # facts of a tensor
            return func(*args, **options)
        pinned = options.pop("pin_memory", None)
        tensors = [each for each in tree_leaves((args, options)) if isinstance(each, torch.Tensor)]
        target = options.get("device") or next((each for each in args if isinstance(each, torch.device)), None)
        on_device = any(each.device.type == "cuda" for each in tensors)
        if name in ("pin_memory", "_pin_memory"):
            return _pinned(args[0].clone())
        if name == "is_pinned":
            return _is_pinned(args[0])
        if not on_device and (target is None or torch.device(target).type != "cuda"):
            return self._on_host(func, name, args, options, pinned)
        if name in _READS:
            return self._read(name, args[0])
        if name not in WHOLE and func._can_decompose():
            with self:
                parts = func.decompose(*args, **options)
            if parts is not NotImplemented:
                return parts
        if name == "_to_copy" and target is not None and torch.device(target).type == "cpu":
            self._waits("a copy to the host")
            return torch.zeros(args[0].shape, dtype=options.get("dtype") or args[0].dtype)
        if name == "copy_" and args[0].device.type == "cpu":
            if not _flag(args, options, 2, "non_blocking") or not _is_pinned(args[0]):
                self._waits("a copy to the host")
            elif self._machine.capturing is not None:
                self.ledger.note(Kind.COPY_IN_CAPTURE, "to the host")
            return args[0].zero_()
        self._check(func, name, args, options, tensors)
        return self._on_device(func, name, args, options, tensors)

    def _on_host(self, func: Any, name: str, args: Sequence[Any], options: dict[str, Any], pinned: Any) -> Any:
        out = func(*args, **options)
        if self._machine.capturing is not None and name not in FREE and isinstance(out, torch.Tensor):
            self.ledger.note(Kind.HOST_WORK_IN_CAPTURE, name)
        return _pinned(out) if pinned else out

    def _read(self, name: str, tensor: torch.Tensor) -> Any:
        """A value of the device, for Python: the host waits. It is 0, 0.0 or true."""
        self._waits(name)
        if name in ("equal", "is_nonzero", "allclose") or tensor.dtype == torch.bool:
            return True
        return 0.0 if tensor.is_floating_point() else 0

    def _waits(self, what: str) -> None:
        self.ledger.note(Kind.WAIT if self._machine.capturing is None else Kind.WAIT_IN_CAPTURE, what)

    def _check(
        self, func: Any, name: str, args: Sequence[Any], options: dict[str, Any], tensors: list[torch.Tensor]
    ) -> None:
        """Notes what CUDA would wait for, refuse or do badly."""
        if name in PRODUCTS and len({each.dtype for each in tensors if each.is_floating_point()}) > 1:
            self.ledger.note(Kind.MIXED_DTYPES, f"{name} of {[str(each.dtype) for each in tensors]}")
        if name in _INDEXED:
            indices = [each for each in tree_leaves(args[1]) if isinstance(each, torch.Tensor)]
            if any(each.dtype in _MASKS for each in indices):
                self._waits(f"{name} with a mask")
            elif any(each.device.type == "cpu" for each in indices):
                self._waits(f"{name} with an index of the host")
        elif _SIZES_BY_VALUE & set(func.tags):
            self._waits(name)
        source = args[1] if name == "copy_" else args[0] if name == "_to_copy" else None
        if isinstance(source, torch.Tensor) and source.device.type == "cpu":
            place = 2 if name == "copy_" else len(args)
            if self._machine.capturing is not None:
                self.ledger.note(Kind.COPY_IN_CAPTURE, "to the device")
            elif not _flag(args, options, place, "non_blocking"):
                self._waits("a copy to the device")
        if name == "scaled_dot_product_attention":
            self._note_attention(args, options)
        if name == "_varlen_attn":
            check_varlen(self._machine.properties.major, args)
            self.ledger.attention["in place"] += 1
        if name in CONVOLUTIONS:
            self.ledger.convolutions.add((tuple(args[0].shape), tuple(args[1].shape)))
        capturing = self._machine.capturing
        if capturing is not None and any(
            each.device.type == "cuda" and each.device.index != capturing for each in tensors
        ):
            self.ledger.note(Kind.WRONG_DEVICE, f"{name} in a capture of cuda:{capturing}")

    def _note_attention(self, args: Sequence[Any], options: dict[str, Any]) -> None:
        query, key = args[:2]
        mask = options.get("attn_mask", args[3] if len(args) > 3 else None)
        path = attention_path(query, key, mask, _flag(args, options, 5, "is_causal"), options.get("enable_gqa", False))
        self.ledger.attention[path] += 1
        if path == "MATH":
            shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, {query.dtype}"
            self.ledger.note(Kind.MATH_ATTENTION, f"{shapes}, {'a' if mask is not None else 'no'} mask")

    def _on_device(
        self, func: Any, name: str, args: Sequence[Any], options: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        with self.fake:
            out = func(*tree_map(self._faked, args), **tree_map(self._faked, options))
        outputs = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        for each in outputs:
            self._track(each)
        if any(each.device.type == "cuda" for each in (*tensors, *outputs)):
            kernels, bytes_ = cost(name, args, tensors, outputs)
            self.ledger.work.add(name, kernels, bytes_)
        return args[0] if name.endswith("_") and tensors and isinstance(args[0], torch.Tensor) else out

    def _faked(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        return self.fake.from_tensor(value)

    def _track(self, tensor: torch.Tensor) -> None:
        """Counts the memory of a tensor on the device, until its storage is freed."""
        storage = tensor.untyped_storage()
        if isinstance(tensor, FakeTensor) and tensor.device.type == "cuda" and not hasattr(storage, "is_counted"):
            storage.is_counted = True  # pyright: ignore[reportAttributeAccessIssue]
            self.ledger.allocated(storage.nbytes())
            weakref.finalize(storage, self.ledger.allocated, -storage.nbytes())


def _flag(args: Sequence[Any], options: Mapping[str, Any], place: int, name: str) -> bool:
    return bool(options.get(name, args[place] if len(args) > place else False))


def _pinned(tensor: Any) -> Any:
    if isinstance(tensor, torch.Tensor):
        tensor.untyped_storage().is_pinned_here = True  # pyright: ignore[reportAttributeAccessIssue]
    return tensor


def _is_pinned(tensor: torch.Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "is_pinned_here", False)


def prepare_torch() -> Callable[[], None]:
    """Lets fake and real tensors live side by side; the returned function takes it back."""
    limit, device_init = fake_tensor.CONSTANT_NUMEL_LIMIT, FakeTensorMode.avoid_device_init
    only_cpu = torch._C._only_lift_cpu_tensors()
    fake_tensor.CONSTANT_NUMEL_LIMIT = -1  # a fake tensor that knows its value would answer `item`
    setattr(FakeTensorMode, "avoid_device_init", property(lambda self: True))  # noqa: B010
    torch._C._set_only_lift_cpu_tensors(True)
    apply = torch.nn.Module._apply
    setattr(torch.nn.Module, "_apply", _apply)  # noqa: B010

    def restore() -> None:
        fake_tensor.CONSTANT_NUMEL_LIMIT = limit
        setattr(FakeTensorMode, "avoid_device_init", device_init)  # noqa: B010
        torch._C._set_only_lift_cpu_tensors(only_cpu)
        torch.nn.Module._apply = apply

    return restore


def _apply(module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    """`module.to` and its like. torch's own exchanges tensors in place, which it refuses for fake ones."""
    for child in module.children() if recurse else ():
        child._apply(fn)
    with torch.no_grad():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, torch.nn.Parameter(fn(parameter), parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, fn(buffer))
    return module
