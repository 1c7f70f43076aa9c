"""A model family of somebody else's: other config keys, a dense talker of one codebook that reads letters, 25 frames a
second.

What it adds to Quartet is this folder, the row `FAMILY`, and a pipeline file.
"""

from pathlib import Path

from services.registry import ENTRY_POINTS, Family

PIPELINE = Path(__file__).parent / "pipeline.yaml"
FAMILY = Family("toy", ("toy_speaker",), package=__name__)


def install(site: Path) -> Path:
    """Installs the row in the folder `site`, as pip does; processes with it in their PYTHONPATH know the family."""
    info = site / "toy_family-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-family\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\ntoy = {__name__}:FAMILY\n")
    return site
