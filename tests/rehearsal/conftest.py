"""The rehearsal: CUDA paths of the engines on a machine without a GPU. See tests/README.md."""

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import services.common.engine.device as device
from tests.rehearsal.support.gpu import prepare_torch


@pytest.fixture(autouse=True)
def fake_tensors_beside_real_ones(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each capture runs once: there are no libraries to warm up."""
    if request.node.path.name in ("test_on_a_gpu.py", "test_vllm_cuda.py"):
        yield
        return
    monkeypatch.setattr(device, "_WARM_UP_RUNS", 0)
    restore = prepare_torch()
    yield
    restore()
