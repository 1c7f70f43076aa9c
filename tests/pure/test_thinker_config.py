"""Settings of the thinker that are refused, and how the cores of a CPU are shared out."""

import pytest

from services.thinker.config import ThinkerSettings
from services.thinker.environment import cores_of_ranks


def test_a_rank_that_vllm_does_not_take_is_refused_by_name() -> None:
    with pytest.raises(SystemExit, match="max_lora_rank: "):
        ThinkerSettings.load(["--model=m", "--max-lora-rank=12"])
    assert ThinkerSettings.load(["--model=m", "--max-lora-rank=64"]).max_lora_rank == 64


def test_adapters_of_flags() -> None:
    settings = ThinkerSettings.load(["--model=m", "--lora", "sea=/a/b", "--lora", "hill=c"])
    assert settings.lora == {"sea": "/a/b", "hill": "c"}
    assert settings.takes_adapters
    assert not ThinkerSettings.load(["--model=m"]).takes_adapters


@pytest.mark.parametrize(
    ("cores", "ranks", "told"),
    [([0, 1], 2, "0|1"), ([2, 3, 5, 7, 8], 2, "2,3|5,7,8"), ([0, 1, 2, 3], 3, "0|1|2,3"), ([4], 2, "nobind")],
)
def test_ranks_share_the_cores(cores: list[int], ranks: int, told: str) -> None:
    assert cores_of_ranks(cores, ranks) == told
