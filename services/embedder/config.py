"""Settings of the embedder's process."""

from typing import ClassVar, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.thinker.config import VllmSettings


class EmbedderSettings(VllmSettings):
    """Settings of the embedder: flags, QUARTET_EMBEDDER_* variables, or keys of the file that --config names."""

    model_config = SettingsConfigDict(env_prefix="QUARTET_EMBEDDER_")
    for_others: ClassVar[tuple[str, ...]] = ("QUARTET_EMBEDDER_MODEL_NAME",)  # docker-compose.yaml's
    changes_outputs: ClassVar[tuple[str, ...]] = ("pooling",)

    pooling: Literal["auto", "cls", "last", "mean"] = Field(
        default="auto",
        description="how the tokens' states become an embedding: the first, the last, their mean; auto: as the "
        "checkpoint says (modules.json), else as vLLM does for its architecture",
    )
    matryoshka: bool = Field(
        default=False,
        description="requests may ask for shorter embeddings, although config.json does not say that the model was "
        "trained for them",
    )
    max_input_tokens: int | None = Field(
        default=None, ge=2, description="longest text, or pair of texts; default: the model's"
    )
    max_inputs: int = Field(default=2048, ge=1, le=65_536, description="texts, or pairs, of a request")
    max_request_tokens: int = Field(default=300_000, ge=1, description="tokens of all texts of a request together")
    max_request_characters: int = Field(
        default=2 * 1024 * 1024, ge=1, description="characters of all texts of a request together, before they are read"
    )
    max_batch_inputs: int = Field(
        default=64, ge=1, description="texts of one engine step; also those of a request that are in the engine"
    )
    max_batched_tokens: int | None = Field(
        default=None, ge=1, description="tokens of one engine step; default: vLLM's, and the longest text at least"
    )
    gpu_memory_utilization: float = Field(
        default=0.85, gt=0, lt=1, description="share of the GPU for weights, activations and KV cache"
    )
    kv_cache_bytes: int | None = Field(
        default=None,
        ge=1,
        description="size of the KV cache, which a decoder has, and an encoder has not; default: on a CPU 256 MiB; on "
        "a GPU what gpu_memory_utilization leaves",
    )
    text_threads: int = Field(default=2, ge=1, description="threads that tokenize texts; long ones have another")
