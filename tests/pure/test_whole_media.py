"""Steps of the thinker's engine that end within no picture, and which queries of a step see a whole one."""

import pytest

from services.thinker.plugin.whole_media import fitting

PICTURES = [(0, 5), (5, 9), (20, 30)]


@pytest.mark.parametrize(
    ("computed", "new", "taken"),
    [
        (0, 4, 0),  # a prompt's first tokens: a picture that is not ended
        (0, 5, 5),
        (0, 7, 7),  # vLLM itself ends the step before the second one, which it does not begin with
        (5, 3, 0),
        (3, 1, 0),  # the prefix cache has its beginning
        (3, 2, 2),
        (9, 5, 5),
        (20, 9, 0),
        (29, 1, 1),
        (30, 100, 100),
    ],
)
def test_a_step_has_all_that_is_left_of_a_picture_or_none_of_it(computed: int, new: int, taken: int) -> None:
    assert fitting(computed, new, PICTURES) == taken


def test_the_queries_of_pictures_in_a_step() -> None:
    prefix = pytest.importorskip("services.thinker.plugin.prefix_attention")
    # request 0: tokens 2 to 11 of 12, request 1: one token, request 2: tokens 0 to 3
    found = prefix.queries_in({0: [(1, 4), (8, 9)], 1: [(3, 5)], 2: [(0, 3)]}, [0, 10, 11, 15], [12, 40, 4])
    seeing = prefix.Seeing
    assert list(found) == [seeing(0, 0, 3, 5), seeing(0, 6, 8, 10), seeing(2, 11, 15, 4)]
