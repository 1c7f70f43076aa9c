"""Which device an engine runs on."""

import torch


def device_name(asked: str) -> str:
    """torch's name for what the setting `device` says: "auto" is "cuda" where there is one, else "cpu"."""
    if asked != "auto":
        return asked
    return "cuda" if torch.cuda.is_available() else "cpu"
