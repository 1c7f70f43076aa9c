"""Tables of small random checkpoints, without torch."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

Sizes = TypeVar("Sizes")


@cache
def read_table(module: str, name: str) -> dict[str, Any]:
    """NAME.yaml beside the file of a `module`. The command line imports such modules, but reads no table."""
    import yaml

    return yaml.safe_load(Path(module).with_name(f"{name}.yaml").read_text())


@dataclass(frozen=True)
class TransformerShape:
    """A decoder with grouped-query attention. Fields are keys of its config, which leaves out zeros."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    num_experts: int = 0
    num_experts_per_tok: int = 0

    def config(self) -> dict[str, int]:
        return {key: size for key, size in asdict(self).items() if size}


def read_sizes(module: str, kind: Callable[..., Sizes]) -> dict[str, Sizes]:
    """The rows of sizes.yaml beside the file of a `module`, by name. A mapping in a row is a TransformerShape."""
    rows = read_table(module, "sizes").items()
    return {name: kind(**{key: _size(stated) for key, stated in row.items()}) for name, row in rows}


def _size(stated: Any) -> Any:
    return TransformerShape(**cast("dict[str, int]", stated)) if isinstance(stated, dict) else stated
