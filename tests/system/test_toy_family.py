"""A family of somebody else's speaks through the real gateway, talker and code2wav, which know nothing of it."""

import base64
import io
import os
from pathlib import Path

import numpy as np
import openai
import pytest
import soundfile
from safetensors.numpy import load_file

from tests.support.stack import running
from tests.support.toy_family import PIPELINE, install
from tests.support.toy_family.code2wav import SAMPLE_RATE_HZ
from tests.support.toy_family.reference import reference_codes
from tests.support.toy_family.tiny import write

pytestmark = pytest.mark.e2e
FRAMES = 30


def test_the_toy_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, site = Path(__file__).parents[2], install(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(site), str(root), os.environ.get("PYTHONPATH", ""))))
    checkpoint = write(tmp_path / "toy")
    with running(checkpoint, tmp_path / "run", "--pipeline", str(PIPELINE)) as stack:
        client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60)
        assert [model.id for model in client.models.list()] == ["toy"]
        answer = client.chat.completions.create(
            model="toy",
            messages=[{"role": "user", "content": "Good evening"}],
            modalities=["audio"],
            audio={"voice": "high", "format": "wav"},
            extra_body={"quartet": {"talker": {"temperature": 0, "max_frames": FRAMES}}},
        )
    audio = answer.choices[0].message.audio
    assert audio is not None
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(audio.data)), dtype="float32")
    codes = reference_codes(checkpoint, "Good evening", "high", FRAMES)
    waves = load_file(checkpoint / "model.safetensors")["waves"]
    assert len(codes) > 5
    assert (rate, len(samples)) == (SAMPLE_RATE_HZ, SAMPLE_RATE_HZ * len(codes) // 25)
    np.testing.assert_allclose(samples, waves[codes].flatten(), atol=1 / 2**14)
