"""The kept rows under CUDA graphs, without CUDA: the forward pass is recorded on static buffers and replayed for the
batches of a scripted schedule, as vLLM's V2 model runner replays its graphs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.common.stream.rows import ROPE_POSITIONS, hidden_states
from services.thinker.plugin.rows import MROPE_POSITIONS, RowKind, RowRequest, RowStore
from tests.support.stage.replay import CaptureError, ReplayedOps

BLOCK, BLOCKS, HIDDEN, VOCABULARY = 4, 16, 8, 50
SIZES = (16, 8, 4, 2)  # tokens of the captured batches, largest first as in vLLM
BUFFER = 32
LAYERS = (0, 3)
KINDS = (*(RowKind(hidden_states(layer), HIDDEN) for layer in LAYERS), MROPE_POSITIONS)
NAMES = tuple(kind.name for kind in KINDS)


class LanguageModel:
    """Stands in for vLLM's: states of two layers, that a token and its position decide."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(VOCABULARY, HIDDEN, generator=generator)
        self.weight = torch.randn(HIDDEN, HIDDEN, generator=generator)

    def model(self, input_ids, positions, intermediate_tensors=None, **_: object):
        states = self.embedding[input_ids]
        later = torch.tanh(states @ self.weight) + positions.sum(0)[:, None]
        return later, [states, later]


def positions_of(first: int, end: int) -> torch.Tensor:
    """Three rope axes that differ."""
    return torch.arange(first, end) * torch.tensor([[1], [2], [3]])


class Worker:
    """The plugin in a worker: the model's forward pass, the store, and the connector that gathers.

    Args:
        rows: the store.
        install_first: whether the store is there when the passes are captured, as with vLLM it is.
    """

    def __init__(self, rows: RowStore, install_first: bool = True) -> None:
        from services.families.qwen3_omni.thinker_model import RecordingThinker
        from services.thinker.plugin.connector import RowConnector

        self.thinker: Any = RecordingThinker.__new__(RecordingThinker)
        torch.nn.Module.__init__(self.thinker)
        self.thinker._records, self.thinker._layers = True, LAYERS
        self.thinker.language_model = LanguageModel()
        self.connector: Any = RowConnector.__new__(RowConnector)
        self.connector._block_size, self.connector._progress, self.connector._sender = BLOCK, {}, self
        self.input_ids = torch.zeros(BUFFER, dtype=torch.int64)
        self.positions = torch.zeros(3, BUFFER, dtype=torch.int64)
        self.slots = torch.full((BUFFER,), -1)
        self.rows: dict[tuple[int, str], dict[int, torch.Tensor]] = {}
        if install_first:
            RowStore.installed = rows
        graphs = ReplayedOps()
        self.replays = {size: graphs.capture(lambda size=size: self.forward(size)).replay for size in SIZES}
        RowStore.installed = rows

    def forward(self, tokens: int) -> torch.Tensor:
        from vllm.forward_context import override_forward_context

        context: Any = SimpleNamespace(slot_mapping={"model.layers.0.attn": self.slots[:tokens]})
        with override_forward_context(context):
            return self.thinker(self.input_ids[:tokens], self.positions[:, :tokens])

    def step(self, batch: Sequence["Scheduled"]) -> None:
        """Computes one batch and gathers what was asked for."""
        self.connector.bind_connector_metadata(self.connector.build_connector_meta(scheduler_output(batch)))
        self.slots.fill_(-1)  # what lies behind a batch in the other buffers stays from earlier ones
        tokens = 0
        for each in batch:
            at = torch.arange(each.first, each.end)
            to = slice(tokens, tokens := tokens + len(at))
            self.input_ids[to] = torch.tensor(each.request.token_ids)[at]
            self.positions[:, to] = positions_of(each.first, each.end)
            self.slots[to] = torch.tensor(each.blocks)[at // BLOCK] * BLOCK + at % BLOCK
        fitting = [size for size in SIZES if size >= tokens]
        self.replays[fitting[-1]]() if fitting else self.forward(tokens)
        self.connector.wait_for_save()

    def send(self, name: str, parts: list[tuple[int, int, int]], rows: torch.Tensor) -> None:
        """The connector's way out."""
        for key, first, count in parts:
            kept = self.rows.setdefault((key, name), {})
            for position in range(first, first + count):
                assert position not in kept, "shipped twice"
                kept[position] = rows[0]
                rows = rows[1:]

    def assert_rows(self, request: "Request", positions: int) -> None:
        """All rows of `request` up to `positions` came, as an eager pass makes them."""
        ids = torch.tensor(request.token_ids[:positions])
        rope = positions_of(0, positions)
        _, states = self.thinker.language_model.model(ids, rope)
        for name, expected in zip(NAMES, (*states, rope.t().int()), strict=True):
            kept = self.rows[(request.key, name)]
            assert sorted(kept) == list(range(positions))
            assert torch.equal(torch.stack([kept[position] for position in range(positions)]), expected), name


@dataclass(frozen=True)
class Request:
    key: int
    token_ids: list[int]


@dataclass(frozen=True)
class Scheduled:
    """Positions `first` to `end` of a request in one step; `new`: also when it comes back from a preemption."""

    request: Request
    first: int
    end: int
    blocks: list[int]
    new: bool = False


def scheduler_output(batch: Sequence[Scheduled]) -> Any:
    """The part of vLLM's that the connector reads."""
    blocks = {str(each.request.key): each.blocks for each in batch}
    running = [each for each in batch if not each.new]
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=str(each.request.key), num_computed_tokens=each.first) for each in batch if each.new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[str(each.request.key) for each in running], num_computed_tokens=[each.first for each in running]
        ),
        num_scheduled_tokens={str(each.request.key): each.end - each.first for each in batch},
        kv_connector_block_state=SimpleNamespace(resolve_block_ids=lambda request_id: (blocks[request_id],)),
    )


def run_schedule(worker: Worker) -> None:
    """Chunks of prompts, decoding beside them, a preemption whose blocks others take, a prefix that is cached."""
    generator = torch.Generator().manual_seed(1)
    a, b, c, e = (Request(i, torch.randint(VOCABULARY, (30,), generator=generator).tolist()) for i in range(4))
    d = Request(4, c.token_ids[:8] + a.token_ids[:10])
    for request in (a, b, c, d, e):
        params = SimpleNamespace(
            extra_args=RowRequest(request.key, {name: [(0, 2**40)] for name in NAMES}).to_extra_args()
        )
        worker.connector.on_new_request(SimpleNamespace(request_id=str(request.key), sampling_params=params))

    worker.step([Scheduled(a, 0, 6, [0, 1], new=True)])
    worker.step([Scheduled(a, 6, 10, [0, 1, 2]), Scheduled(b, 0, 3, [5], new=True)])
    worker.step([Scheduled(a, 10, 11, [0, 1, 2]), Scheduled(b, 3, 4, [5])])
    # a is preempted, and c gets its blocks
    worker.step([Scheduled(b, 4, 5, [5, 3]), Scheduled(c, 0, 8, [0, 1], new=True)])
    worker.step([Scheduled(b, 5, 6, [5, 3]), Scheduled(c, 8, 9, [0, 1, 2])])
    # a comes back elsewhere, its prompt and output at once; d begins as c does
    worker.step([Scheduled(a, 0, 12, [6, 7, 8], new=True), Scheduled(d, 8, 11, [0, 1, 9], new=True)])
    # more than the largest capture
    worker.step([Scheduled(e, 0, 20, [10, 11, 4, 2, 12], new=True), Scheduled(b, 6, 7, [5, 3])])
    worker.step(
        [
            Scheduled(a, 12, 13, [6, 7, 8, 14]),
            Scheduled(d, 11, 12, [0, 1, 9]),
            Scheduled(e, 20, 21, [10, 11, 4, 2, 12, 13]),
        ]
    )
    for request, positions in ((a, 13), (b, 7), (c, 9), (d, 12), (e, 21)):
        worker.assert_rows(request, positions)


@pytest.fixture(autouse=True)
def uninstalled() -> Iterator[None]:
    yield
    RowStore.installed = None


def make_store(kind: type[RowStore] = RowStore, device: str = "cpu") -> RowStore:
    return kind(BLOCK * BLOCKS, KINDS, torch.float32, torch.device(device))


def test_replayed_passes_keep_the_rows_that_eager_ones_would() -> None:
    run_schedule(Worker(make_store()))


class FirstSlots(RowStore):
    """Writes for ever where it wrote first."""

    _first: dict[int, torch.Tensor]

    def write(self, slots, rows) -> None:
        self._first = getattr(self, "_first", {})
        super().write(self._first.setdefault(len(slots), slots.clone()), rows)


class SlotsByPython(RowStore):
    """Asks for the slots' values."""

    def write(self, slots, rows) -> None:
        super().write(torch.tensor([self._padding_slot if slot < 0 else slot for slot in slots.tolist()]), rows)


def test_a_pass_that_holds_on_to_its_capture_fails_here() -> None:
    with pytest.raises(AssertionError):
        run_schedule(Worker(make_store(FirstSlots)))
    with pytest.raises(CaptureError):
        Worker(make_store(SlotsByPython))


def test_a_store_that_comes_after_the_captures_is_never_written_to() -> None:
    """vLLM must register the KV caches with the connector before it captures."""
    with pytest.raises(AssertionError):
        run_schedule(Worker(make_store(), install_first=False))


class ToDevice(TorchDispatchMode):
    """Notes for each copy to another device whether the host goes on meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.non_blocking: list[bool] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            self.non_blocking.append(kwargs.get("non_blocking", False))
        return func(*args, **kwargs)


def test_gathering_does_not_wait_for_the_step() -> None:
    worker = Worker(make_store())
    RowStore.installed = make_store(device="meta")  # as little this host's memory as a GPU's
    shipped: list[torch.device] = []
    worker.connector._sender = SimpleNamespace(send=lambda _, __, rows: shipped.append(rows.device))
    request = Request(7, list(range(8)))
    params = SimpleNamespace(extra_args=RowRequest(7, {ROPE_POSITIONS: [(0, 8)]}).to_extra_args())
    worker.connector.on_new_request(SimpleNamespace(request_id="7", sampling_params=params))
    step = scheduler_output([Scheduled(request, 0, 8, [0, 1], new=True)])
    worker.connector.bind_connector_metadata(worker.connector.build_connector_meta(step))
    with ToDevice() as copies:
        worker.connector.wait_for_save()
    assert (shipped, copies.non_blocking) == ([torch.device("meta")], [True])
