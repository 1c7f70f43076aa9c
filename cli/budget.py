"""`quartet budget`: divides GPU memory between thinker, talker and code2wav.

The constants below estimate, on the safe side, what the checkpoint does not say (CUDA contexts, activations, graphs).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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

# The table of docs/gpus.md: memory as nvidia-smi gives it, MiB.
MOST_GPUS = 8
GPUS = {
    "24 GB (RTX 4090)": 24_564,
    "48 GB (L40S)": 46_068,
    "80 GB (H100)": 81_559,
    "96 GB (RTX PRO 6000)": 97_887,
    "141 GB (H200)": 143_771,
}


@dataclass(frozen=True)
class Demand:
    """What the system must serve.

    Attributes:
        streams: spoken answers at a time.
        context_tokens: longest prompt plus output.
        talker_positions: longest prompt plus frames of an answer.
    """

    streams: int = 8
    context_tokens: int = 32_768
    talker_positions: int = 8192
    dit_bytes: int = 0


@dataclass(frozen=True)
class Layout:
    """The thinker is on the first `tensor_parallel` GPUs, the rest on the next if `apart`, else on the first."""

    tensor_parallel: int = 1
    apart: bool = False

    @property
    def gpus(self) -> int:
        return self.tensor_parallel + self.apart

    @property
    def speech_gpu(self) -> int:
        return self.tensor_parallel if self.apart else 0

    def __str__(self) -> str:
        return f"{self.tensor_parallel} + 1" if self.apart else f"{self.tensor_parallel}"


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
    """Gives talker and code2wav what `demand` takes, and the thinker the rest. Raises TooLittleMemory."""
    usable = gpu_bytes - int(gpu_bytes * FREE_SHARE)
    speech = _speech(sizes, demand, layout)
    taken = sum(share.total for share in speech)
    if layout.apart and taken > usable:
        raise _too_few(gpu_bytes, taken - usable, speech, demand, "")
    ranks = layout.tensor_parallel
    weights = (sizes.weights["thinker"] - sizes.unsplit) // ranks + sizes.unsplit
    working = THINKER_STEP_BYTES + CONTEXT_BYTES + (THINKER_PEER_BYTES if ranks > 1 else 0)
    # A KV head is on one GPU, or on several if these are more. The first GPU keeps the states besides.
    kv_per_token = sizes.kv_per_token // min(ranks, sizes.kv_heads)
    per_token = kv_per_token + sizes.states_per_token
    left = usable - weights - working - (0 if layout.apart else taken)
    tokens = left // per_token // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
    kv, states = tokens * kv_per_token, tokens * sizes.states_per_token
    thinker = Share("thinker", range(ranks), weights, working, kv + states, f"KV cache and states of {tokens} tokens")
    if tokens < demand.context_tokens:
        needed = demand.context_tokens * per_token
        fixed = Share("thinker", range(ranks), weights, working, 0, "")
        context = f", and one context of {demand.context_tokens} tokens {needed / GIB:.1f} GiB"
        raise _too_few(gpu_bytes, needed - left, (fixed, *(() if layout.apart else speech)), demand, context)
    # Given the cache's size, vLLM only checks at its start that this share is free: its own context is there by then.
    utilization = int((thinker.total - CONTEXT_BYTES) / gpu_bytes * 1000) / 1000
    settings = {
        "THINKER_GPU_MEMORY_UTILIZATION": f"{utilization:.3f}",
        "THINKER_KV_CACHE_BYTES": str(kv),
        "THINKER_MAX_CONTEXT_TOKENS": str(demand.context_tokens),
    }
    if sizes.has_speech:
        settings |= {
            "TALKER_MAX_RUNNING_REQUESTS": str(demand.streams),
            "TALKER_MAX_CONTEXT_POSITIONS": str(demand.talker_positions),
            "CODE2WAV_MAX_RUNNING_REQUESTS": str(demand.streams),
        }
    return Budget(gpu_bytes, layout, (thinker, *speech), tokens, settings)


def layouts(sizes: Sizes, gpus: int, tensor_parallel: int | None = None) -> list[Layout]:
    """Lists layouts on at most `gpus` GPUs, best first: speech on its own GPU, then the most GPUs for the thinker."""
    ranks = [1 << n for n in reversed(range(gpus.bit_length())) if sizes.heads % (1 << n) == 0]
    places = (True, False) if sizes.has_speech else (False,)
    candidates = [Layout(n, apart) for apart in places for n in ranks if tensor_parallel in (None, n)]
    return [layout for layout in candidates if layout.gpus <= gpus]


def best(sizes: Sizes, gpu_bytes: int, gpus: int, demand: Demand, tensor_parallel: int | None = None) -> Budget:
    """Returns the first layout's budget that fits. Raises TooLittleMemory, or BudgetError: none is possible."""
    errors = []
    for layout in layouts(sizes, gpus, tensor_parallel):
        try:
            return share_out(sizes, gpu_bytes, demand, layout)
        except TooLittleMemory as error:
            errors.append(error)
    if not errors:
        raise BudgetError(
            f"--tensor-parallel-size {tensor_parallel}: must be a power of two that divides {sizes.heads} attention "
            f"heads, at most --gpus {gpus}"
        )
    raise min(errors, key=lambda error: error.short_bytes)


def _speech(sizes: Sizes, demand: Demand, layout: Layout) -> tuple[Share, ...]:
    """Shares of the GPU of talker and code2wav."""
    gpu = range(layout.speech_gpu, layout.speech_gpu + 1)
    dit = (Share("dit", gpu, 0, 0, demand.dit_bytes, "as requested"),) if demand.dit_bytes else ()
    if not sizes.has_speech:
        return dit
    streams, positions = demand.streams, demand.talker_positions
    rows = 1 << (streams - 1).bit_length()  # a step's, rounded up to a power of two
    row_sizes = rows.bit_length()
    lengths = max(0, (positions - 1).bit_length() - (TALKER_SHORTEST_GRAPH - 1).bit_length()) + 1
    graphs = row_sizes * (lengths + 1) * TALKER_GRAPH_BYTES  # one more for requests that keep many codes
    working = CONTEXT_BYTES + TALKER_ENGINE_BYTES + graphs
    weights, cache = sizes.weights["talker"] + sizes.text_table, streams * positions * sizes.talker_kv_per_position
    note = f"KV cache of {streams} answers of {positions} positions"
    talker = Share("talker", gpu, weights, working, cache, note)
    graphs = row_sizes * CODE2WAV_FRAME_SIZES * CODE2WAV_GRAPH_BYTES
    working = CONTEXT_BYTES + CODE2WAV_ENGINE_BYTES + graphs + rows * CODE2WAV_STEP_BYTES
    past, note = streams * CODE2WAV_STREAM_BYTES, f"the past of {streams} streams"
    code2wav = Share("code2wav", gpu, sizes.weights["code2wav"], working, past, note)
    return (talker, code2wav, *dit)


def _too_few(
    gpu_bytes: int, short_bytes: int, shares: tuple[Share, ...], demand: Demand, context: str
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


def lines(budget: Budget) -> Iterator[str]:
    yield from share_lines(budget)
    yield ""
    if budget.layout.gpus == 1:
        yield "# for .env"
        yield from (f"{name}={value}" for name, value in budget.settings.items())
    else:
        yield "# for quartet up"
        yield from up_flags(budget)


def share_lines(budget: Budget) -> Iterator[str]:
    yield f"{'stage':<10}{'GPU':<6}{'weights':>9}{'working':>9}{'requests':>10}{'total':>8}  GiB"
    for share in budget.shares:
        parts = (share.weights, share.working, share.requests, share.total)
        weights, working, requests, total = (f"{part / GIB:.1f}" for part in parts)
        gpus = f"{share.gpus[0]}" if len(share.gpus) == 1 else f"{share.gpus[0]}-{share.gpus[-1]}"
        yield f"{share.stage:<10}{gpus:<6}{weights:>9}{working:>9}{requests:>10}{total:>8}  {share.note}"
    for gpu in sorted({0, budget.layout.tensor_parallel - 1, budget.layout.speech_gpu}):
        yield f"{'free':<10}{gpu:<6}{budget.free_bytes(gpu) / GIB:>36.1f}  of {budget.gpu_bytes / GIB:.1f}"


def up_flags(budget: Budget) -> Iterator[str]:
    """Yields flags of `quartet up`."""
    ranks, speech = f"tensor-parallel-size={budget.layout.tensor_parallel}", f"device=cuda:{budget.layout.speech_gpu}"
    for stage, place in {"thinker": ranks, "talker": speech, "code2wav": speech}.items():
        if any(share.stage == stage for share in budget.shares):
            yield f"--{stage}-arg=--{place}"
        for variable, value in budget.settings.items():
            prefix, _, name = variable.lower().replace("_", "-").partition("-")
            if prefix == stage:
                yield f"--{stage}-arg=--{name}={value}"


def table(sizes: Sizes, demand: Demand) -> Iterator[str]:
    """Yields the table of docs/gpus.md: layouts, and KV caches in thousands of tokens."""
    yield "| GPUs | " + " | ".join(str(gpus) for gpus in range(1, MOST_GPUS + 1)) + " |"
    yield "|---" * (MOST_GPUS + 1) + "|"
    for name, memory_mib in GPUS.items():
        cells = [_cell(sizes, memory_mib * MIB, gpus, demand) for gpus in range(1, MOST_GPUS + 1)]
        yield f"| {name} | " + " | ".join(cells) + " |"


def _cell(sizes: Sizes, gpu_bytes: int, gpus: int, demand: Demand) -> str:
    try:
        budget = best(sizes, gpu_bytes, gpus, demand)
    except BudgetError:
        return "-"
    return f"{budget.layout}: {budget.context_tokens // 1000}"
