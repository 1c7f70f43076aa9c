"""What tests keep on a machine is made once, found again, and made anew for whatever it depends on."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support import kept


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept, "ROOT", tmp_path / "cache")
    return tmp_path / "cache"


def test_a_value_is_made_once_for_what_it_depends_on() -> None:
    made: list[int] = []

    def make() -> np.ndarray:
        made.append(len(made))
        return np.arange(3)

    for _ in range(2):
        asked = ({"role": "user", "picture": Image.new("RGB", (2, 2))}, (1, 2.0, None))
        assert kept.kept_value(make, *asked).tolist() == [0, 1, 2]
    assert made == [0]
    kept.kept_value(make, {"role": "user", "picture": Image.new("RGB", (2, 2), "red")}, (1, 2.0, None))
    assert made == [0, 1]


def test_it_depends_on_what_files_hold(tmp_path: Path) -> None:
    for name, text in (("a", "x = 1"), ("b", "x = 1"), ("c", "x = 2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "source.py").write_text(text)
    a, b, c = (kept.digest(tmp_path / name) for name in "abc")
    assert a == b != c


def test_two_that_make_the_same_at_once_both_have_it_and_leave_nothing_else(cache: Path) -> None:
    both = threading.Barrier(2, timeout=60)

    def make(out: Path) -> None:
        (out / "file").write_text("whole")
        both.wait()

    with ThreadPoolExecutor(2) as workers:
        first, second = workers.map(lambda _: kept.kept_folder(make, "the same"), range(2))
    assert first == second
    assert (first / "file").read_text() == "whole"
    assert list(cache.iterdir()) == [first]


def test_one_that_fails_leaves_nothing(cache: Path) -> None:
    def fail(out: Path) -> None:
        (out / "half").touch()
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011  # the test's own
        kept.kept_folder(fail, "x")
    assert not list(cache.iterdir())


def test_what_has_no_content_to_tell_it_by_is_refused() -> None:
    with pytest.raises(TypeError, match="object"):
        kept.digest(object())
