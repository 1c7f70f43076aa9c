"""A training loop that can be stopped at any time and resumed."""

import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

OUT = Path(__file__).parent / "out"  # states of trainings; not in git
_SAVE_S = 120
_PRINT_S = 15


class TrainingInterrupt(Exception):
    """The training was stopped by a signal and has saved its state."""


def learning_rate(step: int, steps: int, highest: float, warm_up: int = 100) -> float:
    """Linear for `warm_up` steps, then falling by a cosine to a fiftieth."""
    if step < warm_up:
        return highest * (step + 1) / warm_up
    return highest * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(steps - warm_up, 1))))


class Optimizers:
    """Muon for matrices within layers, AdamW for all else: embeddings, heads, convolutions, norms.

    Source: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.

    Args:
        model: what is trained; parameters without `requires_grad` are not.
        rate: highest learning rate of AdamW.
        outer: parts of names whose matrices are AdamW's.
        muon_rate: highest learning rate of Muon, for updates with the root mean square of AdamW's.
    """

    def __init__(
        self, model: nn.Module, rate: float, outer: Sequence[str] = ("embed", "head"), muon_rate: float | None = None
    ) -> None:
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        inner = [p for name, p in trained if p.ndim == 2 and not any(part in name for part in outer)]
        chosen = set(map(id, inner))
        rest = [p for _, p in trained if id(p) not in chosen]
        self._all: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)]
        self._rates = [rate]
        if inner:
            self._rates.append(muon_rate or rate)
            self._all.append(
                torch.optim.Muon(inner, lr=self._rates[1], weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
            )
        self._parameters = [p for _, p in trained]

    def step(self, loss: torch.Tensor, step: int, steps: int) -> None:
        for optimizer, rate in zip(self._all, self._rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, rate)
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for p in self._parameters:
            if p.grad is None:  # an expert that no token went to
                p.grad = torch.zeros_like(p)
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer in self._all:
            optimizer.step()

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self._all]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for optimizer, state in zip(self._all, states, strict=True):
            optimizer.load_state_dict(state)


def save(name: str, weights: dict[str, Any], optimizers: list[dict[str, Any]], step: int, spent_s: float) -> None:
    """Writes the state of a training, after `step` steps, to `OUT/name.pt`, where `run` and `load` find it."""
    OUT.mkdir(parents=True, exist_ok=True)
    state = {"model": weights, "optimizers": optimizers, "step": step, "spent_s": spent_s}
    torch.save(state, OUT / f"{name}.new")
    os.replace(OUT / f"{name}.new", OUT / f"{name}.pt")


def run(
    name: str,
    model: nn.Module,
    optimizers: Optimizers,
    steps: int,
    step_loss: Callable[[int], tuple[torch.Tensor, dict[str, float]]],
) -> None:
    """Trains `model` to `steps` steps, from the state in `OUT/name.pt`; prints figures every 20 seconds.

    Args:
        step_loss: returns a step's loss and figures. Its random draws depend on the step alone,
            so that a resumed training is the same.

    Raises:
        TrainingInterrupt: by ctrl-C or SIGTERM; the state is saved.
    """
    first, spent_s = _resume(OUT / f"{name}.pt", model, optimizers, steps)
    if first >= steps:
        print(f"{name}: {first} steps, done", flush=True)
        return
    signals: list[int] = []
    before = [signal.signal(sign, lambda number, _: signals.append(number)) for sign in (signal.SIGINT, signal.SIGTERM)]
    begun = saved = printed = time.monotonic()

    model.train()
    for step in range(first, steps):
        torch.manual_seed(step)
        loss, figures = step_loss(step)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"{name}: the loss of step {step} is {loss.item()}")
        optimizers.step(loss, step, steps)
        now, done = time.monotonic(), step + 1
        if now - printed > _PRINT_S or done == steps:
            printed = now
            left_min = (now - begun) / (done - first) * (steps - done) / 60
            shown = "  ".join(f"{key} {value:.3f}" for key, value in figures.items())
            print(f"{name}: step {done}/{steps}  loss {loss.item():.3f}  {shown}  {left_min:.0f} min left", flush=True)
        if now - saved > _SAVE_S or done == steps or signals:
            save(name, model.state_dict(), optimizers.state_dict(), done, spent_s + now - begun)
            saved = now
        if signals:
            print(f"{name}: stopped after {done} steps; the same command goes on", flush=True)
            raise TrainingInterrupt
    for sign, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
        signal.signal(sign, handler)
    model.eval()


def _resume(file: Path, model: nn.Module, optimizers: Optimizers, steps: int) -> tuple[int, float]:
    """Loads a state, if there is one. Returns (next step, seconds spent)."""
    if not file.exists():
        return 0, 0.0
    state = torch.load(file, weights_only=True)
    model.load_state_dict(state["model"])
    if state["step"] < steps:
        optimizers.load_state_dict(state["optimizers"])
    return state["step"], state["spent_s"]


def load(name: str, model: nn.Module) -> Any:
    """Loads the weights of a training that has ended, or was stopped, without gradients.

    Raises:
        FileNotFoundError: that training was not begun.
    """
    file = OUT / f"{name}.pt"
    if not file.exists():
        raise FileNotFoundError(f"{file} is not there: run the training of {name} first")
    model.load_state_dict(torch.load(file, weights_only=True)["model"])
    return model.eval().requires_grad_(False)
