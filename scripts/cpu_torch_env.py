"""Makes a CPU virtual environment importable: run once after `pip install` (by `make setup`).

The package index carries torchvision, torchaudio and torchcodec as CUDA builds. Beside a CPU torch
- torchaudio and torchcodec raise on import, which breaks transformers and vLLM: they are uninstalled
  (Quartet decodes media with PyAV);
- torchvision, which `Qwen3OmniMoeProcessor` needs, only lacks the schemas of two operators: a lazy import hook,
  loaded by a .pth file and so present in spawned processes too, defines them before torchvision is first imported.
Where torch has CUDA, or torchvision is a CPU build, this changes nothing.
"""

import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

HOOK = '''"""By Quartet's scripts/cpu_torch_env.py: operators that a CUDA torchvision misses beside CPU torch."""

import sys
from importlib.abc import MetaPathFinder


class _DefineOperators(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.quartet_torchvision_library = library  # the definitions live as long as this object
        return None


sys.meta_path.insert(0, _DefineOperators())
'''


def imports(module: str) -> bool:
    """Whether `import module` works in a fresh interpreter of this environment."""
    return subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0


def main() -> None:
    import torch

    if torch.version.cuda:
        return
    broken = [name for name in ("torchaudio", "torchcodec") if find_spec(name) and not imports(name)]
    if broken:
        subprocess.run([sys.executable, "-m", "pip", "uninstall", "-q", "-y", *broken], check=True)
    if not imports("torchvision"):
        site = Path(sysconfig.get_paths()["purelib"])
        (site / "quartet_cpu_torchvision.py").write_text(HOOK)
        (site / "quartet_cpu_torchvision.pth").write_text("import quartet_cpu_torchvision\n")
    if not imports("torchvision"):
        sys.exit("torchvision does not import beside this torch; install a CPU build of torchvision")


if __name__ == "__main__":
    main()
