"""Everything that a first run on a GPU can show, in one file to send back: `make first-gpu`.

What this machine is, the doctor, the plan, all tests that need a GPU, and the benchmarks. A step that fails does not
stop the next one. The file has no user's prompts or answers, and neither this host's name nor the home directory.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTHON, QUARTET = sys.executable, str(Path(sys.executable).with_name("quartet"))
_PUBLISHED = "qwen3-omni-30b"
_FACTS = "name,driver_version,memory.total,compute_cap,power.limit,mig.mode.current"


def steps(model: str, out: Path, folder: Path | None) -> dict[str, tuple[int, list[str]]]:
    """By name: most seconds, and the command."""
    alone = [PYTHON, "-m", "benchmarks.stage_alone"]
    speech = [PYTHON, "-m", "benchmarks.speech", "--no-peer"]
    bfloat16 = ["--device", "cuda", "--dtype", "bfloat16"]
    found = {
        "nvidia-smi": (60, ["nvidia-smi", f"--query-gpu={_FACTS}", "--format=csv"]),
        "topology": (60, ["nvidia-smi", "topo", "-m"]),
        "packages": (120, [PYTHON, "-m", "pip", "list", "--format=freeze"]),
        "doctor": (300, [QUARTET, "doctor"]),
        "plan": (300, [QUARTET, "up", "--plan", "--model", model]),
        "tests": (3600, [PYTHON, "-m", "pytest", "-m", "gpu", f"--junitxml={out / 'tests.xml'}"]),
        "talker": (900, [*alone, "talker", *bfloat16, "--json", str(out / "talker.json")]),
        "code2wav": (900, [*alone, "code2wav", *bfloat16, "--json", str(out / "code2wav.json")]),
        "speech": (1800, [*speech, "--json", str(out / "speech.json")]),
    }
    if folder is not None:
        load = ["--concurrency", "1", "8", "32", "--requests", "64", "--load", "0"]
        answers = ["--tokens", "100", "--frames", "300", "--json", str(out / "published-speech.json")]
        found["published-sizes"] = 900, [PYTHON, "-m", "benchmarks.random_checkpoint", _PUBLISHED, str(folder)]
        found["published-speech"] = 1800, [*speech, "--model", str(folder), *load, *answers]
    return found


def run(name: str, limit_s: int, command: list[str], out: Path) -> dict[str, object]:
    """Writes what the command prints to `out`; returns its status and time."""
    print(f"--- {name}: at most {limit_s // 60} minutes ...", flush=True)
    begin = time.monotonic()
    with open(out / f"{name}.txt", "w") as log:
        try:
            status = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=limit_s).returncode
        except FileNotFoundError:
            status = f"there is no {command[0]}"
        except subprocess.TimeoutExpired:
            status = f"ended after {limit_s} s"
    seconds = round(time.monotonic() - begin, 1)
    print(f"    {'ok' if status == 0 else status}, {seconds} s", flush=True)
    return {"command": " ".join(command), "status": status, "seconds": seconds}


def pack(out: Path, file: Path) -> None:
    """All of `out` in one file, without this host's name and the user's home."""
    private = {str(ROOT): "quartet", str(Path.home()): "~", platform.node(): "host"}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        for part in sorted(out.iterdir()):
            text = part.read_text(errors="replace")
            for word, instead in private.items():
                text = text.replace(word, instead) if len(word) > 1 else text
            packed.writestr(part.name, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="Qwen/Qwen3-Omni-30B-A3B-Instruct", help="that the plan is for")
    parser.add_argument(
        "--random-model",
        type=Path,
        metavar="FOLDER",
        help=f"a new directory, for 70 GB: speech also at the sizes of {_PUBLISHED}, with random weights",
    )
    parser.add_argument("--only", nargs="+", metavar="STEP", help="default: all")
    parser.add_argument("--out", type=Path, default=ROOT / "first-gpu", help="directory; the file is beside it")
    flags = parser.parse_args()
    flags.out.mkdir(parents=True, exist_ok=True)
    chosen = steps(flags.model, flags.out.resolve(), flags.random_model)
    unknown = set(flags.only or ()) - set(chosen)
    if unknown:
        parser.error(f"--only: there is no step {', '.join(sorted(unknown))}; there are {', '.join(chosen)}")
    report: dict[str, object] = {
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }
    for name, (limit_s, command) in chosen.items():
        if not flags.only or name in flags.only:
            report[name] = run(name, limit_s, command, flags.out)
    (flags.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    file = flags.out.with_suffix(".zip")
    pack(flags.out, file)
    print(f"--- send back: {file}")


if __name__ == "__main__":
    main()
