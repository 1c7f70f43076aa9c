"""The talker's Triton kernels: compiled for five architectures without a device, and interpreted beside torch's."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from services.talker.kernels import attention, combination, draws, gates, noise, norms, rotation, routing

pytestmark = pytest.mark.long
ARCHITECTURES = (80, 89, 90, 100, 120)
DTYPES = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}
INTERPRETED = [str(Path(__file__).with_name(f"interpreted_{name}.py")) for name in ("kernels", "attention")]
INTEGERS = ("advances", "places", "codes", "drawn", "seeds", "frames", "chosen", "tokens", "experts")
FLOATS = ("temperature", "top_p", "noise", "parts", "sums")
SIZES = (
    *("angle_row", "place_row", "key_row", "key_head", "key_position", "value_row", "value_head", "value_position"),
    *("size", "count", "width", "cut_row", "groups", "rows", "totals"),
)
ROUTES = {"EXPERTS": 128, "WANTED": 6, "RENORMALIZE": True, "BLOCK": 128}
LOOK = {"ROWS": 16, "SIZE": 128, "SIZE_BLOCK": 128, "BLOCK": 64, "PRECISION": "tf32"}
MOST_SHARED_BYTES = 99 * 1024  # of sm_89 and sm_120
# Each kernel with its constants, as at published sizes.
KERNELS: list[tuple[Any, dict[str, Any], int]] = [
    (norms._add_and_norm, {"SIZE": 896, "BLOCK": 1024}, 4),
    (norms._add_and_norm, {"SIZE": 2048, "BLOCK": 2048}, 4),
    (gates._silu_and_multiply, {}, 4),
    (noise._uniform, {"BLOCK": 64}, 4),
    (rotation._rotate_and_store, {"HEADS": 16, "KV_HEADS": 8, "SIZE": 128, "BLOCK": 128, "IS_NORMED": True}, 1),
    (rotation._rotate_and_store, {"HEADS": 12, "KV_HEADS": 4, "SIZE": 128, "BLOCK": 128, "IS_NORMED": False}, 1),
    (routing._route_all, ROUTES | {"ROW_BLOCK": 1}, 4),
    (routing._route_all, ROUTES | {"ROW_BLOCK": 64}, 8),
    (combination._combine_and_norm, {"WANTED": 6, "SIZE": 1024, "BLOCK": 1024}, 4),
    (attention._look, LOOK | {"GROUP": 8, "SPLITS": 32}, 4),
    (attention._look, LOOK | {"GROUP": 2, "SPLITS": 1}, 4),
    (attention._put_together, {"SIZE": 128, "SIZE_BLOCK": 128, "SPLITS": 32}, 4),
    (draws._draw, {"BLOCK": 64, "LOGITS_BLOCK": 2048}, 1),
    (draws._draw, {"BLOCK": 4096, "LOGITS_BLOCK": 4096}, 4),
]


def type_of(argument: str, dtype: str) -> str:
    if argument in FLOATS:
        return "*fp32"
    if argument in INTEGERS:
        return "*i64"
    others = {"eps": "fp32", "scale": "fp32", "cut": "*i1", "ends": "*i32"}
    return others.get(argument, "i32" if argument in SIZES else dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kernel", "constants", "warps"),
    KERNELS,
    ids=[f"{kernel.fn.__name__}-{i}" for i, (kernel, _, _) in enumerate(KERNELS)],
)
def test_a_kernel_compiles_for_every_architecture(
    kernel: Any, constants: dict[str, Any], warps: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel is attention._look and dtype == "float32":
        pytest.skip("not run in float32: see lacks_in_place")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names = [name for name in kernel.arg_names if name not in constants]
    signature = {name: type_of(name, DTYPES[dtype]) for name in names} | dict.fromkeys(constants, "constexpr")
    for architecture in ARCHITECTURES if dtype == "bfloat16" else ARCHITECTURES[2:3]:
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": warps})
        assert made.asm["cubin"].startswith(b"\x7fELF")
        assert f".target sm_{architecture}" in made.asm["ptx"]
        assert made.metadata.global_scratch_size == 0  # a launch allocates nothing
        assert made.metadata.shared <= MOST_SHARED_BYTES


@pytest.mark.parametrize("interpret", ["1", pytest.param("", marks=pytest.mark.gpu)])
def test_kernels_give_what_torch_s_give(interpret: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": interpret}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *INTERPRETED]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]


def test_operators_that_write_say_so() -> None:
    """What a graph's recorder, and torch's compiler, go by."""
    written = {
        str(operator): [argument.name for argument in operator._schema.arguments if argument.is_write]
        for operator in (
            torch.ops.quartet.rotate_and_store.default,
            torch.ops.quartet.add_and_norm.default,
            torch.ops.quartet.silu_and_multiply.default,
            torch.ops.quartet.draw_of_best.default,
            torch.ops.quartet.uniform.default,
            torch.ops.quartet.route.default,
            torch.ops.quartet.combine_and_norm.default,
            torch.ops.quartet.look_in_place.default,
        )
    }
    assert written.pop("quartet.rotate_and_store.default") == ["keys", "values"]
    assert not any(written.values())
