"""Which paths the dit takes, on which device, and what it refuses."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from services.common.engine.device import Accelerator
from services.dit.config import DitSettings
from services.dit.execution import choices
from tests.support.stage.dit_engine import bench
from tests.support.weights.checkpoints import diffusion_checkpoint

A100 = Accelerator("NVIDIA A100-SXM4-80GB", (8, 0), 80 * 1024**3)
T4 = Accelerator("Tesla T4", (7, 5), 16 * 1024**3)


def paths(accelerator: Accelerator | None, **settings: Any) -> dict[str, str]:
    told = choices(DitSettings(model="-", **settings), accelerator, "bfloat16")
    assert not [choice for choice in told if choice.fatal]
    return {choice.part: choice.path for choice in told}


def test_defaults_are_diffusers_own() -> None:
    expected = {
        "weights": "bfloat16",
        "attention": "native",
        "blocks": "eager",
        "models": "all on the device",
        "steps": "up to 8 outputs",
        "devices": "1",
    }
    assert paths(A100) == paths(None) == expected


def test_paths_follow_the_settings() -> None:
    told = paths(A100, attention_backend="flash", compile="on", offload="model", cache="first-block")
    assert told["attention"] == "flash"
    assert told["blocks"] == "compiled"
    assert told["models"] == "offload model"
    assert told["steps"] == "one output each"
    assert paths(A100, context_parallel={"ulysses": 2})["devices"] == "2: ulysses 2 x ring 1"


@pytest.mark.parametrize(
    ("accelerator", "settings", "reason"),
    [
        (None, {"offload": "group"}, "offload=group keeps models off the device"),
        (None, {"attention_backend": "_flash_3"}, "--attention-backend=_flash_3 needs a GPU"),
        (T4, {"attention_backend": "flash"}, "needs sm_80 or newer, this is sm_75"),
        (A100, {"context_parallel": {"ulysses": 2}, "offload": "model"}, "not together with offload=model"),
        (None, {"context_parallel": {"ring": 2}}, "ring of CPUs"),
    ],
)
def test_what_cannot_start_says_what_to_change(
    accelerator: Accelerator | None, settings: dict[str, Any], reason: str
) -> None:
    told = choices(DitSettings(model="-", **settings), accelerator, "bfloat16")
    (fatal,) = [choice for choice in told if choice.fatal]
    assert reason in fatal.reason


def test_paths_are_logged_at_start() -> None:
    checkpoint = diffusion_checkpoint("sd3")
    with capture_logs() as logs, bench(checkpoint, attention_backend="_native_math"):
        (line,) = [entry for entry in logs if entry["event"] == "execution paths"]
    assert line["attention"] == "_native_math"
    assert line["weights"] == "float32"
