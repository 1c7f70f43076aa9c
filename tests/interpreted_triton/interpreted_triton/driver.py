"""What Triton asks of a backend's driver."""

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class InterpreterDriver(DriverBase):
    """No device."""

    def __init__(self) -> None: ...

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty):
        raise NotImplementedError("nothing is compiled")

    def get_benchmarker(self):
        raise NotImplementedError("nothing is tuned")
