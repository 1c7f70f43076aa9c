"""Context parallelism: two processes give what one gives, and none is left behind, however it ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from quartet.v1 import dit_pb2
from services.common.errors import InternalError, InvalidInput
from services.dit.__main__ import start_engine
from services.dit.config import DitSettings
from services.dit.context_parallel.group import Group, GroupFailed, ParallelModels
from services.dit.output import Done, Failed
from tests.support.stage.dit_engine import Bench, bench, fresh, reference
from tests.support.weights.checkpoints import diffusion_checkpoint

FAMILIES = ("flux", "qwen-image")  # wan and flux2-klein pass too: each is seconds of starting processes
TWO = {"ulysses": 2}  # ranks
TIMEOUT_S = 120.0
ENDLESS_STEPS = 20_000  # minutes of work: it is ended before


@pytest.fixture(scope="module")
def make() -> Callable[[str], Path]:
    return diffusion_checkpoint


@pytest.fixture(scope="module")
def adapter(make: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    transformer = fresh(make("flux")).transformer
    transformer.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v", "proj_out"], init_lora_weights=False))
    FluxPipeline.save_lora_weights(folder, get_peft_model_state_dict(transformer))  # pyright: ignore[reportArgumentType]
    return folder


def start(family: str, prompt: str, seed: int = 0, **fields: Any) -> dit_pb2.DitStart:
    if family.startswith("wan"):
        fields = {"num_frames": 5, **fields}
    return dit_pb2.DitStart(
        **{"prompt": prompt, "seed": seed, "num_inference_steps": 3, "width": 64, "height": 64, **fields}
    )


def asked_for(checkpoint: Path, **settings: Any) -> DitSettings:
    return DitSettings(model=str(checkpoint), **settings)


def group_of(dit: Bench) -> Group:
    assert isinstance(dit.engine.models, ParallelModels)
    return dit.engine.models.group


def workers(dit: Bench) -> list[int]:
    return [process.pid for process in group_of(dit).processes if process.pid]


def is_alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {TIMEOUT_S:g} s: {what}"
        time.sleep(0.02)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_give_what_diffusers_gives(family: str, make: Callable[[str], Path]) -> None:
    from PIL import Image

    images = [Image.new("RGB", (64, 64), "teal")] if family == "wan-i2v" else []
    with bench(make(family), context_parallel=TWO) as dit:
        # lengths of prompts that two does not divide, and that are masked where they share a step
        starts = [
            start(family, "a red fox"),
            start(family, "a much longer prompt about the sea", 1, width=48, height=96),
        ]
        starts += [start(family, "x y", 2), start(family, "three words here, or four", 3)]
        orders = [order for asked in starts for order in dit.orders(asked, images)]
        pipeline = fresh(make(family))
        whole, part = lengths(pipeline.transformer), lengths(dit.engine.models.denoisers[0])
        wanted = [reference(pipeline, order) for order in orders]
        for mine, theirs in zip([dit.make([order])[0] for order in orders], wanted, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)
        assert part == {length // 2 for length in whole}, "a rank had more than its part"
        watched = dit.submit_together(orders)
        for mine, theirs in zip(dit.finish(watched), wanted, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)
        assert max(max(w.batches) for w in watched) >= 2, "no step was shared by outputs"
        left = workers(dit)
    assert not any(map(is_alive, left))


def lengths(denoiser: Any) -> set[int]:
    """Of the sequences that come to the denoiser's end; filled as they come."""
    seen: set[int] = set()
    denoiser.proj_out.register_forward_pre_hook(lambda module, args: seen.add(args[0].shape[1]))
    return seen


@pytest.mark.long
def test_adapters_are_those_of_the_request_on_every_rank(make: Callable[[str], Path], adapter: Path) -> None:
    with bench(make("flux"), lora={"style": str(adapter)}, context_parallel=TWO) as dit:
        plain, styled = start("flux", "a red fox"), start("flux", "a red fox")
        styled.loras.add(name="style", weight=0.7)
        orders = [*dit.orders(plain), *dit.orders(styled), *dit.orders(plain)]
        made = dit.make(orders)
    pipeline = fresh(make("flux"))
    wanted = reference(pipeline, orders[0])
    pipeline.load_lora_weights(str(adapter), adapter_name="style")
    pipeline.set_adapters(["style"], [0.7])
    assert (made[1] - wanted).abs().max() > 0.01
    for mine, theirs in zip(made, [wanted, reference(pipeline, orders[1]), wanted], strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)


@pytest.mark.long
def test_a_cancel_and_a_bad_request_leave_the_group_working(make: Callable[[str], Path]) -> None:
    with bench(make("flux"), context_parallel=TWO, max_inference_steps=ENDLESS_STEPS) as dit:
        (order,) = dit.orders(start("flux", "a red fox"))
        before = dit.make([order])[0]
        (long,) = dit.orders(start("flux", "a blue house", num_inference_steps=ENDLESS_STEPS))
        watched = dit.submit(long)
        dit.wait(lambda: len(watched.batches) >= 2)
        dit.engine.cancel(watched.output)
        torch.testing.assert_close(dit.make([order])[0], before)
        assert not isinstance(watched.events[-1], Done | Failed)

        (bad,) = dit.orders(start("flux", "a red fox"))
        bad.arguments["max_sequence_length"] = 1  # type: ignore[index]  # not to be shared by two
        refused = dit.submit(bad)
        dit.wait(lambda: bool(refused.events) and isinstance(refused.events[-1], Failed))
        error = refused.events[-1]
        assert isinstance(error, Failed)
        assert isinstance(error.error, InvalidInput), error
        torch.testing.assert_close(dit.make([order])[0], before)


@pytest.fixture
def broken(make: Callable[[str], Path]) -> Iterator[tuple[Bench, list[BaseException]]]:
    """An engine and what it said was fatal; it may be broken by the test."""
    torch.set_num_threads(1)
    sizes = {"default_size": "64x64", "max_inference_steps": ENDLESS_STEPS}
    settings = asked_for(make("flux"), context_parallel=TWO, **sizes)
    fatal: list[BaseException] = []
    engine = start_engine(settings, fatal.append)
    yield Bench(engine), fatal
    engine.stop()


@pytest.mark.long
@pytest.mark.parametrize("busy", [True, False])
def test_a_killed_worker_ends_the_engine(busy: bool, broken: tuple[Bench, list[Exception]]) -> None:
    dit, fatal = broken
    (pid,) = workers(dit)
    os.kill(pid, signal.SIGTERM)  # a terminal's or a container's is for all processes: rank 0 drains first
    dit.make(dit.orders(start("flux", "a red fox")))
    (order,) = dit.orders(start("flux", "a red fox", num_inference_steps=ENDLESS_STEPS))
    watched = dit.submit(order) if busy else None
    if watched is not None:
        dit.wait(lambda: len(watched.batches) >= 2)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: bool(fatal), "a fatal error")
    assert isinstance(fatal[0], GroupFailed)
    assert "rank 1" in str(fatal[0])
    wait_until(lambda: not is_alive(pid), "the worker's end")
    if watched is not None:
        wait_until(lambda: isinstance(watched.events[-1], Failed), "the output's error")
        last = watched.events[-1]
        assert isinstance(last, Failed)
        assert isinstance(last.error, InternalError)


@pytest.mark.long
def test_an_error_of_one_rank_only_ends_the_engine(broken: tuple[Bench, list[Exception]]) -> None:
    dit, fatal = broken
    (pid,) = workers(dit)
    group = group_of(dit)
    # the worker refuses a name that it has not, and rank 0 waits for its part of a real call
    run = group.run
    group.run = lambda name, *rest: run("nothing", *rest)  # type: ignore[method-assign]
    watched = dit.submit(dit.orders(start("flux", "a red fox"))[0])
    wait_until(lambda: bool(fatal), "a fatal error")
    assert isinstance(fatal[0], GroupFailed)
    assert "nothing" in str(fatal[0])
    # rank 0 waits for rank 1 until its connection is gone
    wait_until(lambda: isinstance(watched.events[-1], Failed), "the output's error")
    wait_until(lambda: not is_alive(pid), "the worker's end")


@pytest.mark.long
@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL", "SIGKILL of the worker"])
def test_no_process_is_left(how: str, make: Callable[[str], Path]) -> None:
    command = [sys.executable, "-m", "services.dit", "--model", str(make("flux")), "--default-size", "64x64"]
    stage = subprocess.Popen(
        [*command, "--context-parallel", "ulysses=2"], stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert stage.stderr is not None
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(stage.stderr or []), daemon=True)
    try:
        seen = ""
        while '"serving"' not in seen:
            seen = stage.stderr.readline()
            assert seen, "the stage ended"
        reader.start()
        children = [child.pid for child in psutil.Process(stage.pid).children(recursive=True)]
        (worker,) = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(worker if how.endswith("worker") else stage.pid, getattr(signal, how.split()[0]))
        status = stage.wait(TIMEOUT_S)
        wait_until(lambda: not any(map(is_alive, children)), "the end of all processes")
        reader.join(TIMEOUT_S)
    finally:
        stage.kill()
        stage.wait()
    if how == "SIGTERM":
        assert status == 0, lines
    elif how != "SIGKILL":
        assert status == 1
        assert any("rank 1 ended with exit status -9" in line for line in lines), lines


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("z-image", {}, "no context-parallel plan for ZImageTransformer2DModel"),
        ("flux", {"context_parallel": {"ulysses": 3}}, "does not divide the 2 attention heads"),
        ("flux", {"cache": "first-block"}, "not together with cache=first-block"),
        ("flux", {"compile": "on"}, "not together with compile"),
        ("flux", {"offload": "model"}, "not together with offload=model"),
        ("flux", {"attention_backend": "flex"}, "attention_backend=flex cannot do that"),
        ("flux", {"context_parallel": TWO | {"ring": 2}}, "attention_backend=native cannot do that"),
        ("flux", {"context_parallel": TWO | {"ring": 2}, "attention_backend": "_native_flash"}, "a ring of CPUs"),
    ],
)
def test_what_does_not_fit_is_refused_at_start(
    family: str, settings: dict[str, Any], reason: str, make: Callable[[str], Path]
) -> None:
    asked = asked_for(make(family), **{"device": "cpu", "context_parallel": TWO, **settings})
    with pytest.raises(ValueError, match=reason):
        start_engine(asked)


def test_too_few_devices_are_refused(make: Callable[[str], Path]) -> None:
    degree = 2
    while degree <= torch.cuda.device_count():
        degree *= 2
    backend = "_native_flash"
    asked = asked_for(make("flux"), device="cuda", attention_backend=backend, context_parallel={"ring": degree})
    with pytest.raises(ValueError, match=f"{degree} CUDA devices are needed"):
        start_engine(asked)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(
    "settings",
    [{"context_parallel": TWO}, {"context_parallel": {"ring": 2}, "attention_backend": "_native_flash"}],
    ids=["ulysses", "ring"],
)
@pytest.mark.parametrize("family", ["flux", "wan"])
def test_two_gpus_give_what_one_gives(family: str, settings: dict[str, Any], make: Callable[[str], Path]) -> None:
    common = {"device": "cuda", "dtype": "bfloat16"}
    asked = start(family, "a red fox")
    with bench(make(family), **common) as dit:
        (wanted,) = dit.make(dit.orders(asked))
    with bench(make(family), **common, **settings) as dit:
        (mine,) = dit.make(dit.orders(asked))
        left = workers(dit)
    assert (mine - wanted).abs().mean() < 0.02
    assert not any(map(is_alive, left))
