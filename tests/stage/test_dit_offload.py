"""offload=model: one model at a time is on the device, whatever the outputs need."""

from typing import Any

import pytest
import torch

from quartet.v1 import dit_pb2
from services.common.engine.device import Accelerator
from services.dit import models
from services.dit.output import Event, Progress
from tests.support.stage.dit_engine import Watched, bench
from tests.support.weights.checkpoints import diffusion_checkpoint

# What stands for a device: its memory is the CPU's, but accelerate takes it for another one.
DEVICE = torch.device("cpu", 0)


class Places:
    """Notes where models are moved to.

    Attributes:
        taken: names of models in the order in which they came to the device.
        most: most models that were there at a time.
    """

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.most = 0
        self._here: set[str] = set()

    def watch(self, name: str, model: Any) -> None:
        move = model.to

        def to(*args: Any, **kwargs: Any) -> Any:
            if DEVICE not in args:
                self._here.discard(name)
            elif name not in self._here:
                self._here.add(name)
                self.taken.append(name)
                self.most = max(self.most, len(self._here))
            return move(*args, **kwargs)

        model.to = to


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Places:
    """Of the models of the next engine, which is started with offload=model."""
    watched = Places()

    def place(pipeline: Any, device: torch.device, offloading: str) -> None:
        models.offload_models(pipeline, DEVICE)
        for name, component in pipeline.components.items():
            if isinstance(component, torch.nn.Module):
                watched.watch(name, component)

    monkeypatch.setattr(models, "_place", place)
    device = Accelerator("what stands for a device", (9, 0), 0)
    monkeypatch.setattr(Accelerator, "of", lambda device_of_settings: device)
    return watched


def start(**fields: Any) -> dit_pb2.DitStart:
    return dit_pb2.DitStart(**{"prompt": "a red fox", "seed": 0, "num_inference_steps": 6, **fields})


def test_a_prompt_is_read_when_nobody_denoises(places: Places) -> None:
    checkpoint = diffusion_checkpoint("qwen-image")
    with bench(checkpoint, offload="model") as dit:
        later = [dit.orders(start(prompt=f"{n} cats"))[0] for n in range(2)]
        joined: list[Watched] = []

        def join_at_step_2(event: Event) -> None:
            if isinstance(event, Progress) and event.step == 2:
                joined.extend(dit.submit(order) for order in later)

        first = dit.submit(dit.orders(start())[0], join_at_step_2)
        dit.finish([first])
        dit.finish(joined)
    assert places.most == 1
    # the two that came later have their prompts read together, and share each load
    assert places.taken.count("transformer") == 2
    assert places.taken.count("text_encoder") == 2
    assert [watched.batches for watched in joined] == [[2] * 6] * 2


def test_two_denoisers_take_turns(places: Places) -> None:
    checkpoint = diffusion_checkpoint("wan")
    with bench(checkpoint, offload="model", default_size="32x32") as dit:
        orders = [dit.orders(start(num_frames=1, num_inference_steps=steps))[0] for steps in (4, 6)]
        dit.make(orders)
    assert "transformer_2" in places.taken
    assert places.most == 1
