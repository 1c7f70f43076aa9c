"""Divides GPU memory between the stages of a model.

The constants below estimate, on the safe side, what the checkpoint does not say (CUDA contexts, activations, graphs).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from cli.sizes import TooLittleMemory
from services.sizes import Sizes, adapter_bytes

GIB = 1024**3
MIB = 1024**2
CONTEXT_BYTES = 3 * GIB // 4  # a process on the GPU: CUDA context, kernels, the allocator's rounding
FREE_SHARE = 0.03  # of the GPU, for nobody
KV_BLOCK_TOKENS = 16

# Models with less weights than these take less for everything but their contexts, in proportion, down to a tenth.
THINKER_LARGE_BYTES = 4 * GIB
TALKER_LARGE_BYTES = GIB
CODE2WAV_LARGE_BYTES = 400 * MIB

# The thinker's largest step: the longest video that its context holds, through the vision tower; vLLM's CUDA graphs.
THINKER_STEP_BYTES = 5 * GIB
THINKER_PEER_BYTES = 3 * GIB // 4  # of each GPU of several: NCCL's and all-reduces' buffers
MOST_CONTEXTS = 64  # longest requests that the cache is made for: a small model's would have millions of KV blocks

# Talker: cuBLAS's workspaces; activations of 512 prompt positions, each of which may go through all experts; a graph of
# about 1,200 kernels for each power of two of rows and of positions. Where attention is in place, positions make no
# graphs; but that is known only once the talker has tried it (`services.talker.varlen.refusal`).
TALKER_ENGINE_BYTES = GIB
TALKER_GRAPH_BYTES = 22 * MIB
TALKER_SHORTEST_GRAPH = 256  # positions
# Code2wav: cuBLAS's and cuDNN's workspaces; activations of the longest step of all streams; a graph of some hundred
# kernels for each power of two of streams and of frames.
CODE2WAV_ENGINE_BYTES = GIB // 2
CODE2WAV_GRAPH_BYTES = 8 * MIB
CODE2WAV_FRAME_SIZES = 5  # 1 to 16 frames a step
CODE2WAV_STEP_BYTES = 80 * MIB
CODE2WAV_STREAM_BYTES = 8 * MIB  # convolutions' and attention's past of one stream

OTHERS = ("talker", "code2wav", "asr", "aligner", "encoder", "dit")  # what the thinker shares GPUs with


@dataclass(frozen=True)
class Gpus:
    """A machine's, by index.

    Attributes:
        memory: bytes of each, as nvidia-smi gives them.
        taken: bytes of each that other programs have.
    """

    memory: tuple[int, ...]
    taken: tuple[int, ...]

    @classmethod
    def alike(cls, memory_bytes: int, count: int = 1) -> "Gpus":
        return cls((memory_bytes,) * count, (0,) * count)

    def usable(self, gpu: int) -> int:
        return self.memory[gpu] - int(self.memory[gpu] * FREE_SHARE) - self.taken[gpu]

    @property
    def roomiest(self) -> list[int]:
        """Those with most room first."""
        return sorted(range(len(self.memory)), key=lambda gpu: -self.usable(gpu))


@dataclass(frozen=True)
class Need:
    """Bytes that a stage takes, whatever else is there. `note` says what its requests' are."""

    weights: int
    working: int
    requests: int
    note: str

    @classmethod
    def whole(cls, size: int) -> "Need":
        """Of a stage of which no more is known."""
        return cls(0, 0, size, "weights and working together")


@dataclass(frozen=True)
class Demand:
    """What the system must serve.

    Attributes:
        streams: spoken answers at a time.
        context_tokens: longest prompt plus output.
        talker_positions: longest prompt plus frames of an answer.
        decoder_streams: of code2wav; None: `streams`.
        kv_cache_bytes: of the thinker; None: what the others leave.
        fixed: of stages that take what they need: dit, encoder, asr, aligner.
        dit_outputs: that a dit denoises at a time, where its memory depends on them.
        asr_kv_cache_bytes, asr_context_tokens: of the thinker that only writes down speech, in its `fixed`.
        aligner_step_s: seconds of sound of an aligner's step, where they are not its default.
        dit_gpus: that the dit's ranks are on, the first ones.
        max_loras, max_lora_rank, adapted: adapters of a step of the thinker, their highest rank, and vLLM's names of
            the layers that they may change.
    """

    streams: int = 8
    context_tokens: int = 32_768
    talker_positions: int = 8192
    decoder_streams: int | None = None
    kv_cache_bytes: int | None = None
    fixed: Mapping[str, Need] = field(default_factory=dict)
    dit_outputs: int | None = None
    asr_kv_cache_bytes: int = 0
    asr_context_tokens: int = 0
    aligner_step_s: float | None = None
    dit_gpus: int = 1
    max_loras: int = 0
    max_lora_rank: int = 16
    adapted: Collection[str] = ()

    @property
    def decoded_streams(self) -> int:
        """Of code2wav."""
        return self.streams if self.decoder_streams is None else self.decoder_streams


@dataclass(frozen=True)
class Layout:
    """Which GPUs stages are on; `thinker`: as many as split it, the first keeps its states."""

    thinker: tuple[int, ...] = (0,)
    others: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: dict.fromkeys(OTHERS, (0,)))

    @property
    def used(self) -> list[int]:
        return sorted({*self.thinker, *(gpu for gpus in self.others.values() for gpu in gpus)})

    def __str__(self) -> str:
        apart = {*self.used} - {*self.thinker}
        return " + ".join(str(count) for count in (len(self.thinker), len(apart)) if count)


@dataclass(frozen=True)
class Share:
    """Bytes that a stage takes of each of its GPUs."""

    stage: str
    gpus: tuple[int, ...]
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
        context_tokens: capacity of the thinker's key-value cache; 0 without a thinker.
        settings: by their names in .env, for stages on one GPU.
    """

    gpus: Gpus
    layout: Layout
    shares: tuple[Share, ...]
    context_tokens: int
    settings: Mapping[str, str]

    def free_bytes(self, gpu: int) -> int:
        """Of other programs and stages, the share for nobody included."""
        taken = sum(share.total for share in self.shares if gpu in share.gpus)
        return self.gpus.memory[gpu] - self.gpus.taken[gpu] - taken


def share_out(sizes: Sizes, gpus: Gpus, demand: Demand, layout: Layout = Layout()) -> Budget:
    """Gives all but the thinker what `demand` takes, and the thinker the rest. Raises TooLittleMemory."""
    others = other_shares(sizes, demand, layout)
    left = {gpu: gpus.usable(gpu) - sum(s.total for s in others if gpu in s.gpus) for gpu in layout.used}
    full = min(left, key=lambda gpu: left[gpu])
    if left[full] < 0:
        raise _too_few(gpus, full, -left[full], [share for share in others if full in share.gpus], demand, "")
    settings: dict[str, str] = {}
    if "talker" in sizes.weights:
        settings["TALKER_MAX_RUNNING_REQUESTS"] = str(demand.streams)
        settings["TALKER_MAX_CONTEXT_POSITIONS"] = str(demand.talker_positions)
    if "code2wav" in sizes.weights:
        settings["CODE2WAV_MAX_RUNNING_REQUESTS"] = str(demand.decoded_streams)
    if "asr" in demand.fixed:
        asr = next(share for share in others if share.stage == "asr")
        share = (asr.total - CONTEXT_BYTES) / gpus.memory[layout.others["asr"][0]]
        settings["ASR_GPU_MEMORY_UTILIZATION"] = f"{math.ceil(share * 1000) / 1000:.3f}"
        settings["ASR_KV_CACHE_BYTES"] = str(demand.asr_kv_cache_bytes)
        settings["ASR_MAX_CONTEXT_TOKENS"] = str(demand.asr_context_tokens)
    if demand.aligner_step_s is not None:
        settings["ALIGNER_MAX_BATCH_AUDIO_S"] = f"{demand.aligner_step_s:g}"
    if demand.dit_outputs is not None:
        settings["DIT_MAX_RUNNING_OUTPUTS"] = str(demand.dit_outputs)
    if "thinker" not in sizes.weights:
        return Budget(gpus, layout, others, 0, settings)
    tightest = min(layout.thinker, key=lambda gpu: left[gpu])
    thinker, tokens = _thinker(sizes, gpus, tightest, left[tightest], layout, demand, others)
    # Given the cache's size, vLLM only checks at its start that this share is free: its own context is there by then.
    largest = max(gpus.memory[gpu] for gpu in layout.thinker)
    utilization = int((thinker.total - CONTEXT_BYTES) / largest * 1000) / 1000
    thinkers = {
        "THINKER_GPU_MEMORY_UTILIZATION": f"{utilization:.3f}",
        "THINKER_KV_CACHE_BYTES": str(tokens * _kv_per_token(sizes, layout)),
        "THINKER_MAX_CONTEXT_TOKENS": str(_context_tokens(sizes, demand)),
    }
    return Budget(gpus, layout, (thinker, *others), tokens, thinkers | settings)


def _thinker(
    sizes: Sizes, gpus: Gpus, gpu: int, left: int, layout: Layout, demand: Demand, others: Sequence[Share]
) -> tuple[Share, int]:
    """Its share of the `left` bytes of the tightest of its GPUs, and the tokens of its KV cache."""
    ranks, stored = len(layout.thinker), sizes.weights["thinker"]
    weights = (stored - sizes.unsplit) // ranks + sizes.unsplit
    step = scaled(THINKER_STEP_BYTES, stored, THINKER_LARGE_BYTES)
    adapters = adapter_bytes(sizes, demand.adapted, demand.max_loras, demand.max_lora_rank, ranks)
    beside_them = f", beside {adapters / GIB:.1f} GiB for adapters" if adapters else ""
    working = step + adapters + CONTEXT_BYTES + (THINKER_PEER_BYTES if ranks > 1 else 0)
    kv_per_token = _kv_per_token(sizes, layout)
    per_token = kv_per_token + sizes.states_per_token  # the first GPU keeps the states besides
    left -= weights + working
    context_tokens = _context_tokens(sizes, demand)
    if demand.kv_cache_bytes is None:
        tokens = min(left // per_token, MOST_CONTEXTS * _blocks(context_tokens))
        least, what = _blocks(context_tokens), f"one context of {context_tokens} tokens"
    else:
        least = tokens = demand.kv_cache_bytes // kv_per_token // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
        what = f"the KV cache of {tokens} tokens that is set"
    tokens = tokens // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
    if tokens < least or least * per_token > left:
        beside = [share for share in others if gpu in share.gpus]
        needed = f", and {what} {least * per_token / GIB:.1f} GiB{beside_them}"
        fixed = Share("thinker", layout.thinker, weights, working, 0, "")
        raise _too_few(gpus, gpu, least * per_token - left, [fixed, *beside], demand, needed)
    note = f"KV cache and states of {tokens} tokens{beside_them}"
    return Share("thinker", layout.thinker, weights, working, tokens * per_token, note), tokens


def _kv_per_token(sizes: Sizes, layout: Layout) -> int:
    """Of each GPU: a KV head is on one, or on several if these are more."""
    return sizes.kv_per_token // min(len(layout.thinker), sizes.kv_heads)


def _context_tokens(sizes: Sizes, demand: Demand) -> int:
    return min(demand.context_tokens, sizes.max_context_tokens or demand.context_tokens)


def _blocks(tokens: int) -> int:
    """Tokens of the KV blocks that hold `tokens`."""
    return -(-tokens // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS


def scaled(size: int, weights: int, large: int) -> int:
    """What a model of `weights` takes of the `size` that one of `large` and more bytes does."""
    return int(size * min(1.0, max(0.1, weights / large)))


def other_shares(sizes: Sizes, demand: Demand, layout: Layout) -> tuple[Share, ...]:
    """Of all stages but the thinker."""
    shares = [_SHARES[stage](sizes, demand, layout.others[stage]) for stage in _SHARES if stage in sizes.weights]
    for stage, need in demand.fixed.items():
        shares.append(Share(stage, layout.others[stage], need.weights, need.working, need.requests, need.note))
    return tuple(shares)


def _talker(sizes: Sizes, demand: Demand, gpus: tuple[int, ...]) -> Share:
    streams, positions, stored = demand.streams, demand.talker_positions, sizes.weights["talker"]
    lengths = max(0, (positions - 1).bit_length() - (TALKER_SHORTEST_GRAPH - 1).bit_length()) + 1
    wide_lengths = lengths // 2 + 1  # powers of four, for requests with many codes
    graphs = _rows(streams).bit_length() * (lengths + wide_lengths) * TALKER_GRAPH_BYTES
    working = CONTEXT_BYTES + scaled(TALKER_ENGINE_BYTES + graphs, stored, TALKER_LARGE_BYTES)
    cache = streams * positions * sizes.talker_kv_per_position
    return Share(
        "talker",
        gpus,
        stored + sizes.text_table,
        working,
        cache,
        f"KV cache of {streams} answers of {positions} positions",
    )


def _code2wav(sizes: Sizes, demand: Demand, gpus: tuple[int, ...]) -> Share:
    streams, stored = demand.decoded_streams, sizes.weights["code2wav"]
    graphs = _rows(streams).bit_length() * CODE2WAV_FRAME_SIZES * CODE2WAV_GRAPH_BYTES
    engine = CODE2WAV_ENGINE_BYTES + graphs + _rows(streams) * CODE2WAV_STEP_BYTES
    working = CONTEXT_BYTES + scaled(engine, stored, CODE2WAV_LARGE_BYTES)
    return Share("code2wav", gpus, stored, working, streams * CODE2WAV_STREAM_BYTES, f"the past of {streams} streams")


_SHARES = {"talker": _talker, "code2wav": _code2wav}


def _rows(streams: int) -> int:
    """Of a step: rounded up to a power of two."""
    return 1 << (streams - 1).bit_length()


def _too_few(
    gpus: Gpus, gpu: int, short_bytes: int, shares: Sequence[Share], demand: Demand, more: str
) -> TooLittleMemory:
    needs = ", ".join(f"{share.stage} {share.total / GIB:.1f} GiB" for share in shares)
    is_spoken = any(share.stage == "talker" for share in shares)
    spoken = f" with {demand.streams} spoken answers at a time" if is_spoken else ""
    lower = ["--streams", "--talker-positions"] if is_spoken else []
    if any(share.stage == "thinker" for share in shares):
        lower += ["--context-tokens", *(["--loras"] if demand.max_loras else [])]
    where = f"GPU {gpu}: " if len(gpus.memory) > 1 else ""
    taken = f", of which other programs have {gpus.taken[gpu] / GIB:.1f}," if gpus.taken[gpu] else ""
    short_gib = math.ceil(10 * short_bytes / GIB) / 10
    return TooLittleMemory(
        f"{where}{gpus.memory[gpu] / GIB:.1f} GiB{taken} are {short_gib:.1f} GiB too few: {needs}{spoken}{more}",
        f"take more GPUs (--gpus) or larger ones{', or lower ' + ' or '.join(lower) if lower else ''}",
        short_bytes,
    )
