"""Tries every pipeline class of diffusers and writes docs/diffusers-classes.md.

    python scripts/diffusers_classes.py CHECKOUT [CLASS ...]

CHECKOUT is a checkout of diffusers' repository: its tests make a tiny checkpoint of each class (the source package of
diffusers does not have them). Each class gets a process of its own. What is known is kept in a folder (--kept), so a
run that was stopped goes on; classes that are named are tried anew.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from services.diffusion.pipelines import silence_libraries  # noqa: E402
from tests.support.classes.apart import apart  # noqa: E402
from tests.support.classes.judging import Verdict, described, judge, judge_checkpoint  # noqa: E402
from tests.support.classes.makers import Maker, classes, makers  # noqa: E402
from tests.support.classes.table import written  # noqa: E402
from tests.support.weights import unlisted  # noqa: E402
from tests.support.weights.unlisted import unlisted_checkpoint  # noqa: E402

PAGE = ROOT / "docs/diffusers-classes.md"
_KEPT = Path.home() / ".cache" / "quartet-diffusers-classes"
_MEMORY_BYTES = 8 << 30
# Where the checkpoint of diffusers' own test does not work here.
OWN = {
    "StableVideoDiffusionPipeline": unlisted.stable_video_diffusion,
    "StableDiffusionXLControlNetUnionPipeline": unlisted.with_union_control_net(),
    "StableDiffusionXLControlNetUnionImg2ImgPipeline": unlisted.with_union_control_net("Img2Img"),
    "StableDiffusionXLControlNetUnionInpaintPipeline": unlisted.with_union_control_net("Inpaint"),
}
SMALL = {"width": 64, "height": 64, "control_mode": 0}


def main() -> None:
    """Ends with a message where the checkout has no tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("classes", nargs="*", help="try these anew; default: all that are not known yet")
    parser.add_argument("--kept", type=Path, default=_KEPT, help="folder of results and logs (default: %(default)s)")
    parser.add_argument("--timeout-s", type=float, default=240.0, help="for each class (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--page", type=Path, default=PAGE, help="file to write (default: %(default)s)")
    given = parser.parse_args()
    torch.set_num_threads(1)  # before any process is forked
    silence_libraries()
    try_all(given.checkout, given.kept, given.classes, given.at_once, given.timeout_s)
    given.page.write_text(written(kept_verdicts(given.kept)))
    print(f"wrote {given.page}")


def try_all(checkout: Path, kept: Path, anew: list[str], at_once: int, timeout_s: float) -> None:
    """Leaves verdicts in `kept`. Raises SystemExit: a class is not known."""
    kept.mkdir(parents=True, exist_ok=True)
    askable = {name for name, reason in classes().items() if reason is None}
    if unknown := set(anew) - askable:
        raise SystemExit(f"no request can ask for {', '.join(sorted(unknown))}")
    wanted = anew or sorted(name for name in askable if not _file(kept, name).exists())
    tests = makers(checkout, frozenset(wanted))  # here, so that no process has to import them again
    works = {name: partial(_try, name, tests.get(name, []), checkout) for name in wanted}
    answers = apart(works, kept, at_once, timeout_s, _MEMORY_BYTES)
    for number, (name, answer) in enumerate(answers, 1):
        verdict = described(name, None)
        if isinstance(answer, str):
            verdict.result, verdict.why = "fails", answer
        else:
            verdict = Verdict(**answer)
        _file(kept, name).write_text(json.dumps(verdict.plain()))
        print(f"{number}/{len(wanted)} {name}: {verdict.result} {verdict.why}", flush=True)


def _try(name: str, tests: list[Maker], checkout: Path) -> dict[str, Any]:
    verdict = judge(described(name, None), tests, checkout)
    if verdict.result == "fails" and name in OWN:
        verdict = judge_checkpoint(described(name, None), unlisted_checkpoint(OWN[name]), SMALL)
    return verdict.plain()


def _file(kept: Path, name: str) -> Path:
    return kept / f"{name}.json"


def kept_verdicts(kept: Path) -> list[Verdict]:
    """Of all classes, by name."""
    verdicts = []
    for name, reason in classes().items():
        file = _file(kept, name)
        known = reason is None and file.exists()
        verdict = described(name, reason)
        if known:  # what the class needs may be seen better today
            kept_facts = json.loads(file.read_text())
            verdict = Verdict(**kept_facts | {"makes": verdict.makes, "needs": verdict.needs})
        elif reason is None:
            verdict.why = "the program has not come to it"
        verdicts.append(verdict)
    return verdicts


if __name__ == "__main__":
    main()
