"""The file of Qwen2.5-Omni's voices: what is read of it, and what is refused."""

from typing import Any

import pytest
import torch

from services.families.qwen2_5_omni.voices import read_voices


def test_voices_are_read_the_default_first(tmp_path):
    parts = {"cond": torch.ones(1, 192, dtype=torch.bfloat16), "ref_mel": torch.ones(1, 9, 80)}
    torch.save(
        {"Ethan": {**parts, "bos_token": 7}, "Chelsie": {**parts, "bos_token": torch.tensor(5)}},
        tmp_path / "spk_dict.pt",
    )
    voices = read_voices(tmp_path)
    assert [(name, voice.bos_token_id) for name, voice in voices.items()] == [("Chelsie", 5), ("Ethan", 7)]
    assert (voices["Ethan"].conditioning.shape, voices["Ethan"].conditioning.dtype) == ((192,), torch.float32)
    assert voices["Ethan"].reference_mel.shape == (9, 80)


class _Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("this ran",)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ({"Chelsie": {"cond": torch.ones(1, 192), "bos_token": 5}}, "Chelsie.ref_mel is missing"),
        ({"Chelsie": {"cond": torch.ones(192), "ref_mel": torch.ones(1, 9, 80), "bos_token": 5}}, "Chelsie.cond must"),
        ({"Chelsie": {"cond": torch.ones(1, 192), "ref_mel": torch.ones(1, 9, 80)}}, "bos_token must be a token id"),
        ({"Chelsie": {"cond": torch.ones(1, 192) / 0, "ref_mel": torch.ones(1, 9, 80), "bos_token": 5}}, "not finite"),
        ([1], "must be a dictionary"),
        (_Code(), "holds more than voices"),
    ],
)
def test_a_voices_file_that_holds_anything_else_or_lacks_a_part_is_refused(tmp_path, capsys, content, error):
    with pytest.raises(ValueError, match=r"spk_dict\.pt does not exist"):
        read_voices(tmp_path)
    torch.save(content, tmp_path / "spk_dict.pt")
    with pytest.raises(ValueError, match=error):
        read_voices(tmp_path)
    assert "this ran" not in capsys.readouterr().out
