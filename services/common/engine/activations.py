"""Activations by their names in checkpoints' configs.

transformers' longer table (`transformers.activations.ACT2FN`) takes over two seconds to import.
"""

from torch import nn

_BY_NAME = {"silu": nn.SiLU(), "gelu": nn.GELU(), "gelu_pytorch_tanh": nn.GELU(approximate="tanh"), "relu": nn.ReLU()}


def activation(name: str) -> nn.Module:
    """The activation that configs call `name`, a shared one. Raises ValueError: none is known."""
    if name not in _BY_NAME:
        raise ValueError(f"config.json: hidden_act {name!r} is not known; known are {', '.join(_BY_NAME)}")
    return _BY_NAME[name]
