"""The key that signs what clients keep for gateways: from a file, or one of the gateway."""

from pathlib import Path

import pytest

from gateway.access.shared import SharedState
from gateway.access.signing import SigningKeyError, load, read_signing_key


def test_a_signing_key_is_all_of_its_file(tmp_path: Path):
    file = tmp_path / "signing.key"
    for key in (bytes(32), bytes(4096), b"\n" * 32, b"x" * 64 + b"\n"):
        file.write_bytes(key)
        assert read_signing_key(file) == key
    signers = [load(file, SharedState()) for _ in range(2)]
    assert signers[0].sign("a", b"b") == signers[1].sign("a", b"b")
    assert len({load(None, SharedState()).sign("a", b"b") for _ in range(3)}) == 3


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, ": No such file or directory"),
        (b"", " has 0 bytes, fewer than 32"),
        (b"x" * 31, " has 31 bytes, fewer than 32"),
        (b"x" * 4097, " has more than 4096 bytes"),
    ],
)
def test_what_is_wrong_with_a_file_of_a_signing_key(tmp_path: Path, content: bytes | None, reason: str):
    file = tmp_path / "signing.key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SigningKeyError) as caught:
        read_signing_key(file)
    fix = "make one by `openssl rand -hex 32 > FILE`, and give every gateway the same"
    assert str(caught.value) == f"--signing-key-file: {file}{reason}; {fix}"


def test_a_directory_is_no_signing_key(tmp_path: Path):
    with pytest.raises(SigningKeyError, match=r"--signing-key-file: .*: Is a directory; make one by"):
        read_signing_key(tmp_path)
