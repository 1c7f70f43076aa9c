"""Tries modular pipelines of diffusers and writes docs/diffusers-modular.md.

python scripts/modular_pipelines.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import diffusers  # noqa: E402

from services.diffusion.pipelines import silence_libraries  # noqa: E402
from tests.support.classes.modular import HEAD, names, row, tried_all  # noqa: E402

PAGE = ROOT / "docs/diffusers-modular.md"


def main() -> None:
    """Ends with an error where a class is not what diffusers makes."""
    silence_libraries()
    results = {}
    for name, result in tried_all():
        results[name] = result
        print(f"{name}: {result}", flush=True)
    rows = [row(name, models, results) for name, models in names().items()]
    PAGE.write_text(HEAD.format(version=diffusers.__version__, rows="\n".join(rows)))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
