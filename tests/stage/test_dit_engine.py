"""The dit's engine: who goes next, who shares a step, what a cancel frees, what one failure leaves alone."""

import gc
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.hooks.first_block_cache import FirstBlockCacheConfig

from quartet.v1 import dit_pb2
from services.common.errors import InternalError, InvalidInput
from services.dit.output import Done, Event, Failed, Preview, Progress, Started
from tests.support.stage.dit_engine import TIMEOUT_S, Bench, Watched, bench, fresh, reference
from tests.support.weights.checkpoints import diffusion_checkpoint


@pytest.fixture(scope="module")
def flux() -> Path:
    return diffusion_checkpoint("flux")


@pytest.fixture(scope="module")
def wan() -> Path:
    return diffusion_checkpoint("wan")


def start(prompt: str = "a red fox", **fields: Any) -> dit_pb2.DitStart:
    return dit_pb2.DitStart(**{"prompt": prompt, "seed": 0, "num_inference_steps": 4, **fields})


def live_tensor_bytes(dit: Bench) -> int:
    dit.settle()
    return sum(t.untyped_storage().nbytes() for t in gc.get_objects() if isinstance(t, torch.Tensor))


class WorkClock:
    """The engine's, which goes on by what is computed: a stall of the machine would count as an output's own time."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def monotonic(self) -> float:
        return self._now_s

    def watch(self, dit: Bench) -> None:
        run = dit.engine.models.run

        def timed(point: Any, arguments: dict[str, Any], loras: Any) -> Any:
            self._now_s += sum(value.numel() for value in arguments.values() if isinstance(value, torch.Tensor)) / 1e6
            return run(point, arguments, loras)

        dit.engine.models.run = timed  # type: ignore[method-assign]


def test_a_small_request_starts_within_two_steps_of_a_large_one(wan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = WorkClock()
    monkeypatch.setattr("services.dit.engine.time", clock)
    with bench(wan) as dit:
        clock.watch(dit)
        (large,) = dit.orders(start(num_frames=33, num_inference_steps=12, width=128, height=128))
        (small,) = dit.orders(start(num_frames=1, num_inference_steps=12, width=32, height=32))
        before = 2
        joined: list[Watched] = []

        def join(event: Event) -> None:
            if isinstance(event, Progress) and event.step == before:
                joined.append(dit.submit(small))

        video = dit.submit(large, join)
        dit.finish([video])
        (image,) = joined
        dit.finish([image])
        order = [(w is image, type(event)) for w, event in dit.log]
        steps_before_start = order[: order.index((True, Started))].count((False, Progress))
        assert steps_before_start - before <= 2
        done = order.index((True, Done))
        assert order[:done].count((False, Progress)) < 12, "the picture waited for the video"
        # and the video goes on all the same: by its share of the time
        assert order[:done].count((False, Progress)) >= before


def test_outputs_join_and_leave_between_steps(flux: Path) -> None:
    with bench(flux) as dit:
        (long,) = dit.orders(start(num_inference_steps=12))
        (short,) = dit.orders(start("x", num_inference_steps=3, seed=4))
        joined: list[Watched] = []

        def join(event: Event) -> None:
            if isinstance(event, Progress) and event.step == 3:
                joined.append(dit.submit(short))

        first = dit.submit(long, join)
        dit.finish([first])
        dit.finish(joined)
        assert [second.batches for second in joined] == [[2, 2, 2]]
        assert first.batches == [1] * 3 + [2] * 3 + [1] * 6


def test_no_step_is_shared_beyond_max_batch(flux: Path) -> None:
    with bench(flux, max_batch=2) as dit:
        watched = dit.submit_together(dit.orders(start(count=5)))
        dit.finish(watched)
        assert max(max(w.batches) for w in watched) == 2


def test_a_cancelled_output_makes_way_at_the_next_step(flux: Path) -> None:
    with bench(flux, max_running_outputs=1) as dit:
        (order,) = dit.orders(start(num_inference_steps=50))
        both = threading.Event()

        def cancel_at_step_3(event: Event) -> None:
            if isinstance(event, Progress) and event.step == 3:
                both.wait(TIMEOUT_S)
                dit.engine.cancel(running.output)

        running = dit.submit(order, cancel_at_step_3)
        queued = dit.submit(dit.orders(start())[0])
        both.set()
        dit.finish([queued])
        assert len(running.batches) == 3
        heard = [(w is queued, type(event)) for w, event in dit.log]
        assert heard.index((True, Started)) > heard.index((False, Progress))
        assert not any(isinstance(event, Done | Failed) for event in running.events)


def test_cancels_leave_nothing_behind(flux: Path) -> None:
    with bench(flux) as dit:
        (order,) = dit.orders(start(num_inference_steps=50))

        def cancel_at_step_3() -> None:
            watched = dit.submit(order)
            dit.wait(lambda: len(watched.batches) >= 3)
            dit.engine.cancel(watched.output)
            dit.log.clear()

        cancel_at_step_3()
        dit.make(dit.orders(start()))
        dit.log.clear()
        gc.collect()
        gc.disable()  # what is freed is freed at once, not when the collector comes round
        try:
            level = live_tensor_bytes(dit)
            for _ in range(30):
                cancel_at_step_3()
            dit.make(dit.orders(start()))
            dit.log.clear()
            one_output_bytes = 1_000_000  # the last one's may still wait for the collector
            assert live_tensor_bytes(dit) < level + one_output_bytes
        finally:
            gc.enable()
        gc.collect()
        assert live_tensor_bytes(dit) <= level


def test_waiting_outputs_can_be_cancelled(flux: Path) -> None:
    with bench(flux, max_running_outputs=1) as dit:
        cancelled = threading.Event()
        running = dit.submit(dit.orders(start())[0], lambda event: cancelled.wait(TIMEOUT_S))
        waiting = dit.submit(dit.orders(start())[0])
        dit.engine.cancel(waiting.output)
        cancelled.set()
        dit.finish([running])
        dit.settle()
        assert waiting.events == []


def test_an_output_that_fails_takes_no_other_with_it(flux: Path) -> None:
    with bench(flux) as dit:
        (good,) = dit.orders(start(num_inference_steps=6))
        (bad,) = dit.orders(start("x"))
        bad.arguments["max_sequence_length"] = 100_000  # type: ignore[index]  # the pipeline itself refuses this
        watched = [dit.submit(good), dit.submit(bad)]
        dit.wait(lambda: bool(watched[1].events) and isinstance(watched[1].events[-1], Failed))
        error = watched[1].events[-1]
        assert isinstance(error, Failed)
        assert isinstance(error.error, InvalidInput)
        torch.testing.assert_close(dit.finish(watched[:1])[0], reference(fresh(flux), good), atol=1e-6, rtol=0)


def test_a_shared_step_that_fails_is_done_one_by_one(flux: Path) -> None:
    with bench(flux) as dit:

        def refuse(module: Any, args: Any) -> None:
            if args[0].shape[0] > 1:
                raise RuntimeError("too large together")
            if args[0].abs().max() > 100:
                raise RuntimeError("a bad sample")

        dit.engine.models.pipeline.transformer.x_embedder.register_forward_pre_hook(refuse)
        orders = dit.orders(start(count=2))
        (bad,) = dit.orders(start(seed=9))
        bad.arguments["latents"] = torch.full((1, 16, 64), 1000.0)  # type: ignore[index]
        watched = dit.submit_together([*orders, bad])
        pictures = dit.finish(watched[:2])
        pipeline = fresh(flux)
        for picture, order in zip(pictures, orders, strict=True):
            torch.testing.assert_close(picture, reference(pipeline, order), atol=1e-4, rtol=0)  # decoded together
        dit.wait(lambda: isinstance(watched[2].events[-1], Failed))
        failed = watched[2].events[-1]
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, InternalError)


def test_previews_come_closer_to_the_picture(flux: Path) -> None:
    with bench(flux) as dit:
        (order,) = dit.orders(start(num_inference_steps=12, previews=3))
        (same,) = dit.orders(start(num_inference_steps=12))
        assert order.preview_steps == {3, 6, 9}
        watched = dit.submit(order)
        (picture,) = dit.finish([watched])
        previews = [event for event in watched.events if isinstance(event, Preview)]
        assert [preview.step for preview in previews] == [3, 6, 9]
        assert all(preview.pixels.shape == (64, 64, 3) for preview in previews)
        distances = [float((preview.pixels / 255 - picture).abs().mean()) for preview in previews]
        assert distances == sorted(distances, reverse=True)
        torch.testing.assert_close(dit.make([same])[0], picture, atol=1e-6, rtol=0)  # previews change nothing


def test_the_engine_stops_while_outputs_wait(flux: Path) -> None:
    with bench(flux) as dit:

        def hold(event: Event) -> None:
            while isinstance(event, Progress) and not dit.engine._stopping:
                time.sleep(0.001)

        watched = dit.submit(dit.orders(start())[0], hold)
        dit.wait(lambda: bool(watched.batches))
    assert isinstance(watched.events[-1], Failed)


def make_lora(checkpoint: Path, out: Path, seed: int) -> Path:
    """An adapter of random weights on the transformer's attention."""
    from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    transformer = fresh(checkpoint).transformer
    transformer.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    torch.manual_seed(seed)
    for name, parameter in transformer.named_parameters():
        if "lora" in name:
            parameter.data.normal_(std=0.3)
    FluxPipeline.save_lora_weights(out, get_peft_model_state_dict(transformer))  # pyright: ignore[reportArgumentType]
    return out


def test_adapters_are_chosen_by_request(flux: Path, tmp_path: Path) -> None:
    adapters = {"ink": make_lora(flux, tmp_path / "ink", 1), "oil": make_lora(flux, tmp_path / "oil", 2)}
    choices = ({}, {"ink": 1.0}, {"ink": 0.5, "oil": -0.7}, {"ink": 1.0})
    pipeline = fresh(flux)
    for name, path in adapters.items():
        pipeline.load_lora_weights(path, adapter_name=name)
    with bench(flux, lora={name: str(path) for name, path in adapters.items()}) as dit:
        orders = [
            dit.orders(start(seed=i, loras=[{"name": n, "weight": w} for n, w in choice.items()]))[0]
            for i, choice in enumerate(choices)
        ]
        watched = dit.submit_together(orders)
        pictures = dit.finish(watched)
        for picture, order, choice in zip(pictures, orders, choices, strict=True):
            if choice:
                pipeline.enable_lora()
                pipeline.set_adapters(list(choice), list(choice.values()))
            else:
                pipeline.disable_lora()
            torch.testing.assert_close(picture, reference(pipeline, order), atol=1e-4, rtol=0)
        assert (pictures[0] - pictures[1]).abs().max() > 0.01
        assert max(watched[0].batches) == 1
        assert max(watched[1].batches) == 2  # with the other that has the same adapters


def test_a_cache_keeps_requests_apart_and_forgets_them(flux: Path) -> None:
    pipeline = fresh(flux)
    pipeline.transformer.enable_cache(FirstBlockCacheConfig(threshold=5.0))
    with bench(flux, cache="first-block:5.0") as dit:
        assert not dit.info.batched
        assert list(dit.info.tasks) == [dit_pb2.DIT_TASK_TEXT_TO_IMAGE]  # edits have no caches
        assert "first-block" in dit.info.not_batched
        orders = dit.orders(start(count=3, num_inference_steps=10))
        for picture, order in zip(dit.make(orders), orders, strict=True):
            torch.testing.assert_close(picture, reference(pipeline, order), atol=1e-6, rtol=0)
        cancelled = dit.submit(orders[0])
        dit.wait(lambda: len(cancelled.batches) >= 2)
        dit.engine.cancel(cancelled.output)
        dit.make(orders[:1])
        states = [
            state._state_cache
            for module in dit.engine.models.pipeline.transformer.modules()
            for hook in getattr(getattr(module, "_diffusers_hook", None), "hooks", {}).values()
            for state in vars(hook).values()
            if hasattr(state, "_state_cache")
        ]
        assert states
        assert not any(states)
    with bench(flux) as exact:
        same = exact.orders(start(num_inference_steps=10))
        assert (exact.make(same)[0] - reference(pipeline, orders[0])).abs().max() > 1e-4, "nothing was cached"


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({"vae_decoding": "sliced"}, 1e-4),
        ({"vae_decoding": "tiled"}, 1e-4),
        ({"attention_backend": "_native_math"}, 1e-4),
        pytest.param({"compile": "on"}, 1e-4, marks=pytest.mark.long),
        ({"cache": "taylorseer"}, 1.0),
        ({"quantization": "float8-storage"}, 1.0),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_of_diffusers(flux: Path, settings: dict[str, Any], tolerance: float) -> None:
    with bench(flux, **settings) as dit:
        orders = dit.orders(start(count=2, num_inference_steps=8))
        pictures = dit.make(orders)
        pipeline = fresh(flux)
        for picture, order in zip(pictures, orders, strict=True):
            wanted = reference(pipeline, order)
            torch.testing.assert_close(picture, wanted, atol=tolerance, rtol=0)
            assert picture.std() > 0.02


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("flux", {"offload": "model"}, "offload=model"),
        ("flux", {"lora": {"ink": "/nowhere"}}, "lora ink"),
        ("sd3", {"cache": "first-block"}, "cache=first-block"),
        ("flux", {"default_size": "100x100"}, "default_size"),
        ("flux", {"max_pixels": 256, "default_size": "16x16"}, "max_pixels"),
        ("flux", {"max_inference_steps": 5, "default_inference_steps": 6}, "default_inference_steps"),
        ("wan", {"max_frames": 4}, "max_frames"),
    ],
)
def test_settings_that_do_not_fit_are_refused_at_start(family: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message), bench(diffusion_checkpoint(family), **settings):
        pass


def test_prompts_are_counted_beside_the_engine() -> None:
    """A fast tokenizer's padding is state: counting by the pipeline's own would change what the engine reads."""
    with bench(diffusion_checkpoint("stable-audio")) as dit:
        stop = threading.Event()

        def count() -> None:
            while not stop.is_set():
                dit.orders(start("rain on a roof", audio_s=0.1))

        switch_interval_s = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        counting = [threading.Thread(target=count) for _ in range(3)]
        try:
            for thread in counting:
                thread.start()
            tokenize = dit.engine.models.pipeline.tokenizer
            lengths = {
                len(tokenize("rain", padding="max_length", max_length=128, truncation=True).input_ids)
                for _ in range(2000)
            }
        finally:
            stop.set()
            sys.setswitchinterval(switch_interval_s)
            for thread in counting:
                thread.join()
        assert lengths == {128}


def test_a_frame_that_fits_no_message_is_refused(wan: Path) -> None:
    with bench(wan) as dit, pytest.raises(InvalidInput, match=r"^pixel_format: a frame"):
        dit.orders(start(num_frames=5, width=2048, height=1024, pixel_format=dit_pb2.PIXEL_FORMAT_FLOAT32))


def test_what_is_no_diffusers_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no model_index\.json"), bench(tmp_path):
        pass


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": "  "}, "prompt"),
        ({"prompt": "fox " * 600}, "prompt"),
        ({"negative_prompt": "fog"}, "negative_prompt"),
        ({"width": 64}, "height"),
        ({"width": 65, "height": 64}, "width"),
        ({"width": 4096, "height": 4096}, "width"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"num_inference_steps": 201}, "num_inference_steps"),
        ({"guidance_scale": -1.0}, "guidance_scale"),
        ({"guidance_scale": float("nan")}, "guidance_scale"),
        ({"guidance_scale": 1001.0}, "guidance_scale"),
        ({"width": 16, "height": 16384}, "height"),
        ({"count": 11}, "count"),
        ({"num_frames": 5}, "num_frames"),
        ({"audio_s": 1.0}, "audio_s"),
        ({"loras": [{"name": "ink", "weight": 1}]}, r"loras\[0\].name"),
        ({"previews": 4}, "previews"),
        ({"task": dit_pb2.DIT_TASK_TEXT_TO_VIDEO}, "task"),
        ({"task": dit_pb2.DIT_TASK_IMAGE_EDIT}, "images"),
        ({"images": [{}, {}]}, "images"),
        ({"mask": {}}, "mask"),
    ],
)
def test_bad_requests_name_the_field(shared: Bench, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{field}: "):
        shared.orders(start(**fields))


@pytest.fixture(scope="module")
def shared(flux: Path):
    with bench(flux) as started:
        yield started


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"offload": "model"},
        {"offload": "group"},
        {"offload": "sequential"},
        {"compile": "on"},
        {"attention_backend": "_native_efficient"},
        {"dtype": "bfloat16"},
    ],
    ids=lambda settings: next(iter(settings), "plain"),
)
def test_on_cuda(flux: Path, settings: dict[str, Any]) -> None:
    pipeline = fresh(flux).to("cuda")
    with bench(flux, device="cuda", **settings) as dit:
        orders = dit.orders(start(count=3))
        for picture, order in zip(dit.make(orders), orders, strict=True):
            tolerance = 0.2 if "dtype" in settings else 1e-2
            torch.testing.assert_close(picture, reference(pipeline, order), atol=tolerance, rtol=0)


@pytest.mark.gpu
def test_cancels_leave_device_memory_as_it_was(flux: Path) -> None:
    with bench(flux, device="cuda") as dit:
        (order,) = dit.orders(start(num_inference_steps=50))
        dit.make(dit.orders(start()))
        level = torch.cuda.memory_allocated()
        for _ in range(200):
            watched = dit.submit(order)
            dit.wait(lambda watched=watched: len(watched.batches) >= 3)
            dit.engine.cancel(watched.output)
            dit.log.clear()
        dit.make(dit.orders(start()))
        dit.log.clear()
        gc.collect()
        assert torch.cuda.memory_allocated() == level
