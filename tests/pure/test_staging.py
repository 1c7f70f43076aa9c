"""Copies between device and host: what arrives, and that neither side waits for the other."""

import pytest
import torch

from services.common.engine.device import Staging

SLEEP_CYCLES = 2_000_000_000  # about a second of a GPU


def test_on_a_cpu_nothing_is_copied():
    staging, tensor = Staging(torch.device("cpu")), torch.randn(5, 3)
    assert staging.to_device(tensor) is tensor
    assert staging.to_host(tensor) == (tensor, None)


@pytest.mark.gpu
def test_what_comes_back_is_what_went():
    staging, tensor = Staging(torch.device("cuda")), torch.randn(2500, 2048)
    moved = staging.to_device(tensor)
    tensor.zero_()  # it is read no more
    on_host, copied = staging.to_host(moved)
    assert copied is not None
    copied.synchronize()
    assert on_host.is_pinned()
    assert torch.equal(on_host, moved.cpu())
    assert on_host.any()


@pytest.mark.gpu
def test_a_copy_waits_for_the_step_before_it_and_not_for_the_one_after():
    staging, device = Staging(torch.device("cuda")), torch.device("cuda")
    made = torch.zeros(2500, 2048, device=device)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES // 10)
    made.fill_(7)  # the step that makes it
    on_host, copied = staging.to_host(made)
    torch.cuda._sleep(SLEEP_CYCLES)  # the step after
    after = torch.cuda.Event()
    after.record()
    assert copied is not None
    copied.synchronize()
    assert not after.query()
    assert bool((on_host == 7).all())


@pytest.mark.gpu
def test_a_copy_to_the_device_does_not_wait_for_the_step_under_way():
    staging, device = Staging(torch.device("cuda")), torch.device("cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    under_way = torch.cuda.Event()
    under_way.record()
    moved = staging.to_device(torch.full((2500, 2048), 7.0))
    assert not under_way.query()  # this thread has not waited for it
    assert bool((moved == 7).all())
    assert moved.device.type == device.type
