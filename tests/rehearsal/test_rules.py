"""What the rehearsal finds: each fault, planted, is found; and what is right is not."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from services.common.engine.device import CudaGraphs, Staging, make_current
from tests.rehearsal.support.gpu import FakeGpu, fake_gpu
from tests.rehearsal.support.ledger import Kind

CUDA = torch.device("cuda", 0)
Run = Callable[[], torch.Tensor]


def test_the_rules_were_read_in_this_torch():
    """`kernels.py` and the kinds of waits follow torch's sources: read them again before this is changed."""
    assert torch.__version__.startswith("2.13.")


def planted(gpu: FakeGpu) -> dict[str, tuple[Run, Kind]]:
    x = torch.zeros(4, 8, device=CUDA, dtype=torch.bfloat16)
    wide, host = torch.zeros(8, 8, device=CUDA), torch.ones(4, 8)
    query = torch.zeros(1, 16, 4, 64, device=CUDA, dtype=torch.bfloat16)
    key, mask = query.new_zeros(1, 2, 9, 64), torch.ones(4, 9, dtype=torch.bool, device=CUDA)
    wait, copy = Kind.WAIT_IN_CAPTURE, Kind.COPY_IN_CAPTURE
    return {
        "item": (lambda: x * float(x.sum()), wait),
        "branch": (lambda: x if (x > 0).any() else -x, wait),
        "mask": (lambda: x[x > 0], wait),
        "nonzero": (lambda: x.nonzero(), wait),
        "list as index": (lambda: x[[0, 1]], copy),
        "list as index of what is written": (lambda: x.index_put_((torch.tensor([0]),), x[0]), wait),
        "to the host": (lambda: x.cpu(), wait),
        "tensor of a list": (lambda: x + torch.tensor([1.0] * 8, device=CUDA), copy),
        "host tensor that is moved": (lambda: x + host.to(CUDA, non_blocking=True), copy),
        "host work": (lambda: x * 2 + (host * 2).sum().item(), Kind.HOST_WORK_IN_CAPTURE),
        "dtypes": (lambda: F.linear(x, wide), Kind.MIXED_DTYPES),
        "MATH": (
            lambda: F.scaled_dot_product_attention(query, key, key, attn_mask=mask, enable_gqa=True),
            Kind.MATH_ATTENTION,
        ),
    }


FAULTS = """item, branch, mask, nonzero, list as index, list as index of what is written, to the host, tensor of a list,
host tensor that is moved, host work, dtypes, MATH""".replace("\n", " ").split(", ")


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_capture_is_found(name: str):
    with fake_gpu() as gpu, torch.inference_mode():
        faults = planted(gpu)
        assert list(faults) == FAULTS
        run, kind = faults[name]
        gpu.ledger.clear()
        try:
            CudaGraphs(CUDA).capture(run)
        except Exception as error:  # torch's fake kernels refuse some by themselves
            refusal: Exception | None = error
        else:
            refusal = None
    assert gpu.ledger.of(kind), (gpu.ledger.faults(), refusal)


def test_host_and_device_in_one_operator_are_refused():
    with fake_gpu(), torch.inference_mode(), pytest.raises(RuntimeError, match=r"same device|two different devices"):
        torch.add(torch.zeros(4, device=CUDA), torch.ones(4))


def test_a_step_without_faults_has_none_and_is_counted():
    with fake_gpu() as gpu, torch.inference_mode():
        x, weight = torch.zeros(4, 8, device=CUDA), torch.zeros(16, 8, device=CUDA)
        gpu.ledger.clear()
        CudaGraphs(CUDA).capture(lambda: F.silu(F.linear(x, weight)).view(8, 8) + 1)
    assert not gpu.ledger.events
    (work,) = gpu.ledger.captures
    assert work.operators == {"linear": 1, "silu": 1, "add": 1}
    product = 4 * (4 * 8 + 16 * 8 + 4 * 16)
    assert work.bytes == product + 2 * 4 * 64 + 2 * 4 * 64


def test_memory_in_use_is_counted_until_it_is_freed():
    with fake_gpu() as gpu:
        kept = torch.zeros(1024, device=CUDA)
        view = kept[:16]
        gone = torch.zeros(512, device=CUDA)
        assert (gpu.ledger.live_bytes, gpu.ledger.peak_bytes) == (6144, 6144)
        del gone, kept
        assert (gpu.ledger.live_bytes, gpu.ledger.peak_bytes) == (4096, 6144)
        del view
        assert gpu.ledger.live_bytes == 0


def test_copies_wait_unless_they_are_staged():
    with fake_gpu() as gpu:
        staging, host = Staging(CUDA), torch.ones(8)
        staging.to_host(staging.to_device(host))
        assert not gpu.ledger.events
        host.to(CUDA).cpu()
        assert sum(gpu.ledger.events.values()) == 2
        assert {event.kind for event in gpu.ledger.events} == {Kind.WAIT}


def test_work_of_a_thread_that_has_not_made_its_device_current_is_found():
    with fake_gpu(devices=2) as gpu:
        second = torch.device("cuda", 1)
        torch.cuda.Stream(second)
        assert gpu.ledger.of(Kind.WRONG_DEVICE)
        gpu.ledger.clear()
        make_current(second)
        torch.cuda.Stream(second)
        torch.cuda.Event().record()
        CudaGraphs(second).capture(lambda: torch.zeros(4, device=second) + 1)
        assert not gpu.ledger.events
        assert {device for _, device in gpu.ledger.devices} == {1}
