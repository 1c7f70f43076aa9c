"""Which device an engine runs on."""

import torch


def engine_device(asked: str) -> torch.device:
    """The device that the setting `device` names, with its index: "auto" is "cuda" where there is one, else "cpu".

    Raises:
        ValueError: there is no such device on this machine; names the setting and what there is.
    """
    cuda_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(("cuda" if cuda_devices else "cpu") if asked == "auto" else asked)
    except RuntimeError:
        raise ValueError(f"--device {asked}: must be auto, cpu, cuda or cuda:N") from None
    if device.type != "cuda":
        return device
    index = device.index or 0
    if index >= cuda_devices:
        there = f"there are {cuda_devices} CUDA devices" if cuda_devices else "torch finds no CUDA device here"
        raise ValueError(f"--device {asked}: {there}; give --device auto or another number")
    return torch.device("cuda", index)


def disable_cudnn_attention() -> None:
    """Keeps torch's attention from cuDNN, in this process.

    torch prefers cuDNN on Hopper and Blackwell, where it makes a plan for each new shape and keeps it for that shape
    only: 25 to 440 ms at each new length of a prompt, while everything else in the process waits.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def make_current(device: torch.device) -> None:
    """Makes a CUDA `device` the calling thread's current one: streams, graphs and libraries' handles are made there.

    Every thread of an engine begins with it, as torch's current device is a thread's own.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
