"""Tries modular pipelines of diffusers and writes docs/diffusers-modular.md.

    python scripts/modular_pipelines.py [CLASS ...]

Without classes it tries all that have a tiny checkpoint. Else the results of others stay as the page has them.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import diffusers  # noqa: E402

from services.diffusion.pipelines import silence_libraries  # noqa: E402
from tests.support.classes.modular import HEAD, names, row, tried  # noqa: E402
from tests.support.weights.modular import MADE  # noqa: E402

PAGE = ROOT / "docs/diffusers-modular.md"
_SERVED = re.compile(r"^\| (\w+) \|.*\| (served .*) \|$", re.MULTILINE)


def main() -> None:
    """Ends with an error where a class is not what diffusers makes."""
    silence_libraries()
    chosen = sys.argv[1:] or list(MADE)
    results = dict(_SERVED.findall(PAGE.read_text())) if PAGE.exists() else {}
    for name in chosen:
        results.pop(name, None)
        results[name] = tried(name)
        print(f"{name}: {results[name]}", flush=True)
        rows = [row(each, models, results) for each, models in names().items()]
        PAGE.write_text(HEAD.format(version=diffusers.__version__, rows="\n".join(rows)))


if __name__ == "__main__":
    main()
