"""Divides GPU memory between the stages of a model.

The constants below estimate, on the safe side, what the checkpoint does not say (CUDA contexts, activations, graphs).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from cli.sizes import BudgetError, TooLittleMemory
from services.sizes import Sizes

GIB = 1024**3
MIB = 1024**2
CONTEXT_BYTES = 3 * GIB // 4  # a process on the GPU: CUDA context, kernels, the allocator's rounding
FREE_SHARE = 0.03  # of the GPU, for nobody
KV_BLOCK_TOKENS = 16

# The thinker's largest step: the longest video that its context holds, through the vision tower; vLLM's CUDA graphs.
THINKER_STEP_BYTES = 5 * GIB
THINKER_PEER_BYTES = 3 * GIB // 4  # of each GPU of several: NCCL's and all-reduces' buffers
MOST_CONTEXTS = 64  # longest requests that the cache is made for: a small model's would have millions of KV blocks

# Talker: cuBLAS's workspaces; activations of 512 prompt positions, each of which may go through all experts; a graph of
# about 2,000 kernels for each power of two of rows and of positions.
TALKER_ENGINE_BYTES = GIB
TALKER_GRAPH_BYTES = 32 * MIB
TALKER_SHORTEST_GRAPH = 256  # positions
# Code2wav: cuBLAS's and cuDNN's workspaces; activations of the longest step of all streams; a graph of some hundred
# kernels for each power of two of streams and of frames.
CODE2WAV_ENGINE_BYTES = GIB // 2
CODE2WAV_GRAPH_BYTES = 8 * MIB
CODE2WAV_FRAME_SIZES = 5  # 1 to 16 frames a step
CODE2WAV_STEP_BYTES = 80 * MIB
CODE2WAV_STREAM_BYTES = 8 * MIB  # convolutions' and attention's past of one stream

SPEECH = ("talker", "code2wav", "dit")  # what the thinker shares GPUs with


@dataclass(frozen=True)
class Demand:
    """What the system must serve.

    Attributes:
        streams: spoken answers at a time.
        context_tokens: longest prompt plus output.
        talker_positions: longest prompt plus frames of an answer.
        dit_bytes: memory to leave for a dit.
        taken_bytes: memory of each GPU that other programs have.
    """

    streams: int = 8
    context_tokens: int = 32_768
    talker_positions: int = 8192
    dit_bytes: int = 0
    taken_bytes: int = 0


@dataclass(frozen=True)
class Layout:
    """Which GPUs a stage is on.

    Attributes:
        thinker: as many as split it; the first is that of its states.
        others: the GPU of each of SPEECH.
    """

    thinker: range = range(1)
    others: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(SPEECH, 0))

    @classmethod
    def of(cls, tensor_parallel: int, apart: int = 0, stages: Sequence[str] = SPEECH) -> "Layout":
        """The thinker on the first `tensor_parallel` GPUs, `stages` on the `apart` after them, else on the first."""
        places = {stage: tensor_parallel + min(i, apart - 1) if apart else 0 for i, stage in enumerate(stages)}
        return cls(range(tensor_parallel), places)

    @property
    def gpus(self) -> int:
        return max(self.used) + 1

    @property
    def used(self) -> list[int]:
        return sorted({*self.thinker, *self.others.values()})

    @property
    def is_apart(self) -> bool:
        """Whether the thinker has its GPUs for itself."""
        return not {*self.thinker} & {*self.others.values()}

    def __str__(self) -> str:
        apart = {*self.others.values()} - {*self.thinker}
        return " + ".join(str(count) for count in (len(self.thinker), len(apart)) if count)


@dataclass(frozen=True)
class Share:
    """Bytes that a stage takes of each of its GPUs."""

    stage: str
    gpus: range
    weights: int
    working: int
    requests: int
    note: str

    @property
    def total(self) -> int:
        return self.weights + self.working + self.requests


@dataclass(frozen=True)
class Budget:
    """How GPUs are shared.

    Attributes:
        gpu_bytes: of each GPU.
        context_tokens: capacity of the thinker's key-value cache.
        settings: by their names in .env, for stages on one GPU.
    """

    gpu_bytes: int
    layout: Layout
    shares: tuple[Share, ...]
    context_tokens: int
    settings: Mapping[str, str]

    def free_bytes(self, gpu: int) -> int:
        return self.gpu_bytes - sum(share.total for share in self.shares if gpu in share.gpus)


def share_out(sizes: Sizes, gpu_bytes: int, demand: Demand, layout: Layout = Layout()) -> Budget:
    """Gives talker, code2wav and dit what `demand` takes, and the thinker the rest. Raises TooLittleMemory."""
    usable = gpu_bytes - int(gpu_bytes * FREE_SHARE) - demand.taken_bytes
    speech = _speech(sizes, demand, layout)
    left = [usable - sum(share.total for share in speech if gpu in share.gpus) for gpu in range(layout.gpus)]
    if min(left) < 0:
        full = left.index(min(left))
        raise _too_few(gpu_bytes, -left[full], [share for share in speech if full in share.gpus], demand, "")
    settings: dict[str, str] = {}
    if "talker" in sizes.weights:
        settings["TALKER_MAX_RUNNING_REQUESTS"] = str(demand.streams)
        settings["TALKER_MAX_CONTEXT_POSITIONS"] = str(demand.talker_positions)
    if "code2wav" in sizes.weights:
        settings["CODE2WAV_MAX_RUNNING_REQUESTS"] = str(demand.streams)
    if "thinker" not in sizes.weights:
        return Budget(gpu_bytes, layout, speech, 0, settings)
    beside = [share for share in speech if {*share.gpus} & {*layout.thinker}]
    thinker, tokens, kv = _thinker(sizes, min(left[gpu] for gpu in layout.thinker), layout, demand, gpu_bytes, beside)
    # Given the cache's size, vLLM only checks at its start that this share is free: its own context is there by then.
    utilization = int((thinker.total - CONTEXT_BYTES) / gpu_bytes * 1000) / 1000
    thinkers = {
        "THINKER_GPU_MEMORY_UTILIZATION": f"{utilization:.3f}",
        "THINKER_KV_CACHE_BYTES": str(kv),
        "THINKER_MAX_CONTEXT_TOKENS": str(_context_tokens(sizes, demand)),
    }
    return Budget(gpu_bytes, layout, (thinker, *speech), tokens, thinkers | settings)


def _thinker(
    sizes: Sizes, left: int, layout: Layout, demand: Demand, gpu_bytes: int, beside: Sequence[Share]
) -> tuple[Share, int, int]:
    """Its share of the `left` bytes; tokens and bytes of its KV cache. `beside`: shares of its GPUs."""
    ranks = len(layout.thinker)
    weights = (sizes.weights["thinker"] - sizes.unsplit) // ranks + sizes.unsplit
    working = THINKER_STEP_BYTES + CONTEXT_BYTES + (THINKER_PEER_BYTES if ranks > 1 else 0)
    # A KV head is on one GPU, or on several if these are more. The first GPU keeps the states besides.
    kv_per_token = sizes.kv_per_token // min(ranks, sizes.kv_heads)
    per_token = kv_per_token + sizes.states_per_token
    left -= weights + working
    context_tokens = _context_tokens(sizes, demand)
    tokens = min(left // per_token, MOST_CONTEXTS * context_tokens) // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
    if tokens < context_tokens:
        needed = context_tokens * per_token
        fixed = Share("thinker", layout.thinker, weights, working, 0, "")
        context = f", and one context of {context_tokens} tokens {needed / GIB:.1f} GiB"
        raise _too_few(gpu_bytes, needed - left, [fixed, *beside], demand, context)
    kv, states = tokens * kv_per_token, tokens * sizes.states_per_token
    note = f"KV cache and states of {tokens} tokens"
    return Share("thinker", layout.thinker, weights, working, kv + states, note), tokens, kv


def _context_tokens(sizes: Sizes, demand: Demand) -> int:
    return min(demand.context_tokens, sizes.max_context_tokens)


def layouts(sizes: Sizes, gpus: int, tensor_parallel: int | None = None, *, has_dit: bool = False) -> list[Layout]:
    """Lists layouts on at most `gpus` GPUs, best first: each stage on its own, then the fewest GPUs for the thinker."""
    others = [stage for stage in SPEECH if stage in sizes.weights or (stage == "dit" and has_dit)]
    if "thinker" not in sizes.weights:
        return [Layout.of(0, min(len(others), gpus), others)] if others else []
    ranks = [1 << n for n in range(gpus.bit_length()) if sizes.heads % (1 << n) == 0]
    places = (True, False) if others else (False,)
    return [
        Layout.of(n, min(len(others), gpus - n) if apart else 0, others)
        for apart, n in product(places, ranks)
        if tensor_parallel in (None, n) and n + apart <= gpus
    ]


def best(sizes: Sizes, gpu_bytes: int, gpus: int, demand: Demand, tensor_parallel: int | None = None) -> Budget:
    """Returns the first layout's budget that fits. Raises TooLittleMemory, or BudgetError: none is possible."""
    candidates = layouts(sizes, gpus, tensor_parallel, has_dit=bool(demand.dit_bytes))
    if not candidates:
        raise BudgetError(
            f"--tensor-parallel-size {tensor_parallel}: must be a power of two that divides {sizes.heads} attention "
            f"heads, at most the {gpus} GPUs that there are"
        )
    return first_fit(sizes, gpu_bytes, demand, candidates)


def first_fit(sizes: Sizes, gpu_bytes: int, demand: Demand, candidates: Sequence[Layout]) -> Budget:
    """Raises TooLittleMemory: none of `candidates` fits; says what the best lacks."""
    errors = []
    for layout in candidates:
        try:
            return share_out(sizes, gpu_bytes, demand, layout)
        except TooLittleMemory as error:
            errors.append(error)
    raise min(errors, key=lambda error: error.short_bytes)


def _speech(sizes: Sizes, demand: Demand, layout: Layout) -> tuple[Share, ...]:
    """Shares of all but the thinker."""
    shares = [_SHARES[stage](sizes, demand, layout.others[stage]) for stage in SPEECH if stage in sizes.weights]
    if demand.dit_bytes:
        shares.append(Share("dit", _gpu(layout.others["dit"]), 0, 0, demand.dit_bytes, "as requested"))
    return tuple(shares)


def _talker(sizes: Sizes, demand: Demand, gpu: int) -> Share:
    streams, positions = demand.streams, demand.talker_positions
    lengths = max(0, (positions - 1).bit_length() - (TALKER_SHORTEST_GRAPH - 1).bit_length()) + 1
    graphs = _rows(streams).bit_length() * (lengths + 1) * TALKER_GRAPH_BYTES  # one more for requests with many codes
    working = CONTEXT_BYTES + TALKER_ENGINE_BYTES + graphs
    weights, cache = sizes.weights["talker"] + sizes.text_table, streams * positions * sizes.talker_kv_per_position
    note = f"KV cache of {streams} answers of {positions} positions"
    return Share("talker", _gpu(gpu), weights, working, cache, note)


def _code2wav(sizes: Sizes, demand: Demand, gpu: int) -> Share:
    rows = _rows(demand.streams)
    graphs = rows.bit_length() * CODE2WAV_FRAME_SIZES * CODE2WAV_GRAPH_BYTES
    working = CONTEXT_BYTES + CODE2WAV_ENGINE_BYTES + graphs + rows * CODE2WAV_STEP_BYTES
    past, note = demand.streams * CODE2WAV_STREAM_BYTES, f"the past of {demand.streams} streams"
    return Share("code2wav", _gpu(gpu), sizes.weights["code2wav"], working, past, note)


_SHARES = {"talker": _talker, "code2wav": _code2wav}


def _rows(streams: int) -> int:
    """Of a step: rounded up to a power of two."""
    return 1 << (streams - 1).bit_length()


def _gpu(index: int) -> range:
    return range(index, index + 1)


def _too_few(
    gpu_bytes: int, short_bytes: int, shares: Sequence[Share], demand: Demand, context: str
) -> TooLittleMemory:
    needs = ", ".join(f"{share.stage} {share.total / GIB:.1f} GiB" for share in shares)
    is_spoken = any(share.stage == "talker" for share in shares)
    spoken = f" with {demand.streams} spoken answers at a time" if is_spoken else ""
    lower = "--streams, --talker-positions or --context-tokens" if is_spoken else "--context-tokens"
    return TooLittleMemory(
        f"{gpu_bytes / GIB:.1f} GiB are {short_bytes / GIB:.1f} GiB too few: {needs}{spoken}{context}",
        f"give the thinker a GPU of its own or several (--gpus), or lower {lower}",
        short_bytes,
    )
