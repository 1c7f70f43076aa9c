"""`make first-gpu`: what it packs."""

import json
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = [sys.executable, str(ROOT / "scripts" / "first_gpu.py")]


def test_it_packs_what_there_is_and_names_what_failed(tmp_path: Path) -> None:
    out = tmp_path / "found"
    flags = ["--only", "nvidia-smi", "plan", "--model", str(tmp_path / "none"), "--out", str(out)]
    ended = subprocess.run([*SCRIPT, *flags], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    with zipfile.ZipFile(tmp_path / "found.zip") as packed:
        assert packed.namelist() == ["nvidia-smi.txt", "plan.txt", "report.json"]
        report, texts = (
            json.loads(packed.read("report.json")),
            "".join(packed.read(n).decode() for n in packed.namelist()),
        )
    assert report["plan"]["status"] == 2
    assert report["nvidia-smi"]["status"] in (0, "there is no nvidia-smi")
    assert "--model" in texts
    assert str(Path.home()) not in texts
    assert len(platform.node()) < 2 or platform.node() not in texts


def test_a_step_that_is_none_is_named() -> None:
    ended = subprocess.run([*SCRIPT, "--only", "lunch"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "there is no step lunch; there are nvidia-smi, " in ended.stderr
