"""The activations of checkpoints, by the names that their configs have for them.

transformers has a longer table of the same names (`transformers.activations.ACT2FN`). Importing it takes more than two
seconds, as much as torch itself, and nothing else of transformers is needed when a talker or a code2wav starts.
"""

from torch import nn

_BY_NAME = {"silu": nn.SiLU(), "gelu": nn.GELU(), "gelu_pytorch_tanh": nn.GELU(approximate="tanh"), "relu": nn.ReLU()}


def activation(name: str) -> nn.Module:
    """The activation that a config calls `name`; shared, for it has no parameters.

    Raises:
        ValueError: none is known by this name.
    """
    if name not in _BY_NAME:
        raise ValueError(f"config.json: hidden_act {name!r} is not known; known are {', '.join(_BY_NAME)}")
    return _BY_NAME[name]
