"""torch.cuda for GPUs that are not there: devices, streams, events, graphs. Nothing runs, so nothing has to wait."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

GIB = 2**30


@dataclass(frozen=True)
class Properties:
    """What a driver says of a GPU."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int = 132

    @property
    def capability(self) -> tuple[int, int]:
        return self.major, self.minor


H100 = Properties("NVIDIA H100 80GB HBM3", 9, 0, 80 * GIB)


def _index(device: Any) -> int | None:
    """None: no device is named."""
    if device is None or isinstance(device, int):
        return device
    return torch.device(device).index


@dataclass
class Machine:
    """GPUs, each thread's current one, and the capture that goes on.

    Attributes:
        capturing: the device of the capture; None: there is none.
        on_capture: entered around each capture.
        on_use: called with each use of a stream, an event or a graph, and the index of its device.
    """

    properties: Properties
    devices: int
    capturing: int | None = None
    on_capture: Callable[[], AbstractContextManager[None]] = nullcontext
    on_use: Callable[[str, int], None] = lambda kind, device: None
    _thread: threading.local = field(default_factory=threading.local)

    @property
    def current(self) -> int:
        return getattr(self._thread, "device", 0)

    @current.setter
    def current(self, device: int) -> None:
        if not 0 <= device < self.devices:
            raise RuntimeError(f"invalid device ordinal {device}")
        self._thread.device = device

    @contextmanager
    def on(self, device: Any) -> Iterator[None]:
        before, index = self.current, _index(device)
        self.current = before if index is None else index
        try:
            yield
        finally:
            self.current = before

    def stream_of(self, device: Any = None) -> "Stream":
        """The calling thread's current stream of a device."""
        index = _index(device)
        index = self.current if index is None else index
        return getattr(self._thread, "streams", {}).get(index) or Stream(self, index)

    @contextmanager
    def in_stream(self, stream: "Stream") -> Iterator[None]:
        streams = self._thread.streams = getattr(self._thread, "streams", {})
        before = streams.get(stream.index)
        streams[stream.index] = stream
        try:
            with self.on(stream.index):
                yield
        finally:
            streams[stream.index] = before

    def set_stream(self, stream: "Stream") -> None:
        self._thread.streams = getattr(self._thread, "streams", {}) | {stream.index: stream}
        self.current = stream.index

    @contextmanager
    def in_threads(self, mode: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """Threads that start meanwhile run in a `mode` of their own."""
        run = threading.Thread.run

        def run_in_mode(thread: threading.Thread) -> None:
            with mode():
                run(thread)

        with patch.object(threading.Thread, "run", run_in_mode):
            yield

    @contextmanager
    def captured(self, graph: "Graph", pool: Any = None, stream: "Stream | None" = None, **_: Any) -> Iterator[None]:
        if self.capturing is not None:
            raise RuntimeError("a capture goes on")
        graph.index = self.current
        self.on_use("graph", graph.index)
        if stream is not None and stream.index != graph.index:
            raise RuntimeError("the stream is another device's")
        self.capturing = graph.index
        try:
            with self.on_capture(), self.in_stream(stream or self.stream_of()):
                yield
        finally:
            self.capturing = None


class Stream:
    def __init__(self, machine: Machine, index: int) -> None:
        self._machine, self.index, self.device = machine, index, torch.device("cuda", index)
        machine.on_use("stream", index)

    def wait_stream(self, other: "Stream") -> None:
        self._machine.on_use("stream", self.index)

    def wait_event(self, event: "Event") -> None:
        self._machine.on_use("stream", self.index)

    def synchronize(self) -> None: ...

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event(self._machine)
        event.record(self)
        return event


class Event:
    def __init__(self, machine: Machine, **_: Any) -> None:
        self._machine = machine

    def record(self, stream: Stream | None = None) -> None:
        self._machine.on_use("event", (stream or self._machine.stream_of()).index)

    def wait(self, stream: Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "Event") -> float:
        return 1.0


class Graph:
    def __init__(self, machine: Machine) -> None:
        self._machine, self.index = machine, -1

    def replay(self) -> None:
        self._machine.on_use("graph", self.index)


@contextmanager
def stubbed(machine: Machine) -> Iterator[Machine]:
    """`machine` in the place of torch.cuda."""

    def stream(device: Any = None, **_: Any) -> Stream:
        index = _index(device)
        return Stream(machine, machine.current if index is None else index)

    properties, free = machine.properties, machine.properties.total_memory
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: machine.devices,
        "current_device": lambda: machine.current,
        "set_device": lambda device: setattr(machine, "current", _index(device) or 0),
        "device": machine.on,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: properties.capability,
        "get_device_name": lambda device=None: properties.name,
        "mem_get_info": lambda device=None: (free, free),
        "Stream": stream,
        "stream": lambda given: nullcontext() if given is None else machine.in_stream(given),
        "set_stream": machine.set_stream,
        "current_stream": machine.stream_of,
        "default_stream": machine.stream_of,
        "Event": lambda **options: Event(machine, **options),
        "CUDAGraph": lambda *args, **options: Graph(machine),
        "graph": machine.captured,
        "graph_pool_handle": lambda: (0, 1),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: machine.capturing is not None,
    }
    with (
        patch.multiple(torch.cuda, **functions),
        patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None),
    ):
        yield machine
