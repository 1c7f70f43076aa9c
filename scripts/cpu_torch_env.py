"""Makes a CPU virtual environment importable: run once after `pip install` (by `make setup`, and in the thinker image).

The package index carries torchvision, torchaudio and torchcodec as CUDA builds. Beside a CPU torch
- torchaudio and torchcodec raise on import, which breaks transformers and vLLM: they are uninstalled where a plain
  `pip install` brought them (Quartet decodes media with PyAV, and requirements.lock leaves them out);
- torchvision, which `Qwen3OmniMoeProcessor` needs, only lacks the schemas of two operators: a lazy import hook,
  loaded by a .pth file and so present in spawned processes too, defines them before torchvision is first imported.
Where torch has CUDA, or torchvision is a CPU build, this changes nothing.
"""

import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
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


def is_cpu_build(package: str) -> bool:
    """Returns whether an installed package's version is a build without CUDA. Raises PackageNotFoundError."""
    return version(package).endswith("+cpu")


def is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def main() -> None:
    """Mends this interpreter's environment. Raises SystemExit: torchvision still does not import."""
    if not is_installed("torch") or not is_cpu_build("torch"):
        return
    broken = [name for name in ("torchaudio", "torchcodec") if is_installed(name) and not is_cpu_build(name)]
    if broken:
        subprocess.run([sys.executable, "-m", "pip", "uninstall", "-q", "-y", *broken], check=True)
    if not is_installed("torchvision") or is_cpu_build("torchvision"):
        return
    site = Path(sysconfig.get_paths()["purelib"])
    (site / "quartet_cpu_torchvision.py").write_text(HOOK)
    (site / "quartet_cpu_torchvision.pth").write_text("import quartet_cpu_torchvision\n")
    if subprocess.run([sys.executable, "-c", "import torchvision"], check=False).returncode:
        sys.exit("torchvision does not import beside this torch; install a CPU build of torchvision")


if __name__ == "__main__":
    main()
