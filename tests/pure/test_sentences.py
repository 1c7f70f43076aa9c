"""Where long text is cut."""

import pytest

from gateway.pipeline.sentences import cut


@pytest.mark.parametrize(
    ("text", "most_bytes", "pieces"),
    [
        ("Short.", 100, ["Short."]),
        ("First one. Second one. Third.", 24, ["First one. Second one. ", "Third."]),
        ("It is 3.50 now. Ok", 17, ["It is 3.50 now. ", "Ok"]),
        ("No end of a sentence, but a clause", 25, ["No end of a sentence, ", "but a clause"]),
        ("words without any pause", 12, ["words ", "without any ", "pause"]),
        ("abcdefghij", 4, ["abcd", "efgh", "ij"]),
        ("你好。今天天气很好，我们走吧！", 30, ["你好。", "今天天气很好，", "我们走吧！"]),
        ("A. ... --- B.", 4, ["A. ", "B."]),
    ],
)
def test_where_text_is_cut(text, most_bytes, pieces):
    assert cut(text, most_bytes) == pieces
    assert all(len(piece.encode()) <= most_bytes for piece in pieces)
