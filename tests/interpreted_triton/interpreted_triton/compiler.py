"""What Triton asks of a backend's compiler, which is never called."""

from triton.backends.compiler import BaseBackend, GPUTarget


class InterpreterBackend(BaseBackend):
    """Nothing is compiled."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "interpreted"

    def parse_options(self, options):
        raise NotImplementedError("nothing is compiled")

    def add_stages(self, stages, options, language):
        raise NotImplementedError("nothing is compiled")

    def load_dialects(self, context):
        raise NotImplementedError("nothing is compiled")

    def get_module_map(self):
        raise NotImplementedError("nothing is compiled")
