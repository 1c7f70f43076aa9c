"""Client secrets, without a gateway: what their texts have, what is refused, and sessions that do not fit into them."""

import base64
import random
import string
import zlib
from pathlib import Path
from typing import Any

import pytest

from gateway.access import client_secrets, secret_text
from gateway.access.api_keys import ApiKey, ApiKeyEntry, digest, new_key
from gateway.access.client_secrets import ClientSecrets
from gateway.access.secret_text import MAX_CHARACTERS, MAX_SESSION_BYTES, PREFIX, SecretTexts
from gateway.access.shared import SharedState
from gateway.access.signing import Signer
from gateway.errors import ApiError

ALICE, BOB = new_key(), new_key()
KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
HEAD_BYTES = secret_text._HEAD.size
# Parts of a secret's bytes, but for the session between them.
PARTS = {
    "form": slice(0, 1),
    "expiry": slice(1, 9),
    "nonce": slice(9, 25),
    "API key": slice(25, 41),
    "signature": slice(-32, None),
}


def key(name: str = "alice", text: str = ALICE) -> ApiKey:
    return ApiKey(ApiKeyEntry(name=name, sha256=digest(text)))  # pyright: ignore[reportCallIssue]


def dense(characters: int) -> dict[str, Any]:
    """A session that deflates to three quarters at most."""
    letters = string.ascii_letters + string.digits
    return {"instructions": "".join(random.Random(0).choices(letters, k=characters))}


def data_of(text: str) -> bytes:
    return base64.urlsafe_b64decode(text.removeprefix(PREFIX) + "==")


def text_of(data: bytes) -> str:
    return PREFIX + base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class Clock:
    now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> ClientSecrets:
    return ClientSecrets(now=clock)


@pytest.fixture
def two(clock: Clock) -> tuple[ClientSecrets, ClientSecrets]:
    """Of two gateways with one signing key, which share nothing else."""
    first, second = (ClientSecrets(SharedState(), Signer(KEY), clock) for _ in range(2))
    return first, second


def test_a_secret_is_found_until_it_expires(two, clock):
    alice, session = key(), {"instructions": "Grüße", "\ud800": [1.5, None, "\ud83d\ude00"]}
    text, made = two[0].make(alice, session, 10)
    assert text.startswith("ek_")
    assert set(text[3:]) <= {*string.ascii_letters, *string.digits, *"-_"}  # as the subprotocol of a browser
    assert made.expires_at == 1_000_010
    assert made.session == session
    for store in two:
        assert store.find(text) == made
        assert store.is_of(made, key("renamed"))
        assert not store.is_of(made, key("alice", BOB))
        assert store.find("") is store.find("ek_") is None
    clock.now_s += 9.5
    assert two[1].find(text) == made
    clock.now_s += 0.5
    assert two[0].find(text) is two[1].find(text) is None


def test_no_two_secrets_are_alike_and_none_has_its_keys_hash(store):
    texts = {store.make(key(), {}, 10)[0] for _ in range(50)}
    assert len(texts) == 50
    for text in texts:
        assert bytes.fromhex(digest(ALICE))[:8] not in data_of(text)


def test_a_secret_without_an_api_key_is_of_none(store):
    _, made = store.make(None, {}, 10)
    assert not store.is_of(made, key())
    _, made = store.make(key(), {}, 10)
    assert store.is_of(made, key())


@pytest.mark.parametrize("signer", [Signer(OTHER_KEY), None])
def test_a_secret_of_another_signing_key_is_not_known(clock, signer):
    made, other = ClientSecrets(signer=Signer(KEY), now=clock), ClientSecrets(signer=signer, now=clock)
    text, _ = made.make(key(), {}, 10)
    assert made.find(text) is not None
    assert other.find(text) is None
    assert made.find(other.make(key(), {}, 10)[0]) is None


@pytest.mark.parametrize("session", [{}, {"instructions": "Be brief."}, dense(3000), dense(9000)], ids=len)
def test_what_is_changed_anywhere_is_not_known(store, session):
    """Each part, at random: bits, bytes that are taken away or added, parts of another secret."""
    draw = random.Random(1)
    (text, _), (other, _) = (store.make(each, session, 10) for each in (key(), key("bob", BOB)))
    data, foreign = data_of(text), data_of(other)
    assert text_of(data) == text
    parts = PARTS | {"session": slice(HEAD_BYTES, len(data) - 32)}
    for name, part in parts.items():
        begin, end, _ = part.indices(len(data))
        changed = [data[:begin] + foreign[part] + data[end:]]
        for _ in range(25 if end > begin else 0):
            at = draw.randrange(begin, end)
            changed.append(data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :])
            changed.append(data[:at] + data[at + 1 :])
            changed.append(data[:at] + draw.randbytes(draw.randrange(1, 9)) + data[at:])
            changed.append(data[:at] + draw.randbytes(end - at) + data[end:])
        assert not [each for each in changed if each not in (data, foreign) and store.find(text_of(each))], name
    assert not [size for size in range(len(data)) if store.find(text_of(data[:size]))]
    assert store.find(text) is not None


def test_another_text_for_the_same_bytes_is_not_known(store):
    """Python's base64 reads more than one."""
    text = store.make(key(), {"instructions": "??>>"}, 10)[0]
    while not {"-", "_"} <= set(text[3:]) or len(data_of(text)) % 3 == 0:  # its last character has bits to spare
        text = store.make(key(), {"instructions": "x" * random.Random(text).randrange(100)}, 10)[0]
    last = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"
    others = [text[:-1] + last[(last.index(text[-1]) + 1) % 64], text + "=", text + "==", text + "\n", " " + text]
    others += [text[:20] + each + text[20:] for each in ("!", "\n", " ", ".", "=", "é", "\udc80", "\0")]
    others += [text[:3] + text[3:].translate(str.maketrans("-_", "+/")), text.upper(), text[3:], "ek_" + text]
    assert data_of(others[0]) == data_of(text)
    assert [each for each in others if store.find(each)] == []
    assert store.find(text)


def test_a_signature_for_another_purpose_is_none():
    signer = Signer(KEY)
    text = SecretTexts(signer).write(10, bytes(16), b"{}")[0]
    signed = data_of(text)[:-32]
    assert SecretTexts(signer).read(text_of(signed + signer.sign("client secret", signed))) is not None
    for purpose in ("", "client", "client secret ", "API key of a client secret"):
        assert SecretTexts(signer).read(text_of(signed + signer.sign(purpose, signed))) is None


@pytest.mark.parametrize(
    "session",
    [
        b"",
        b"\xff\xff",
        zlib.compress(b"{}", wbits=-15)[:-1],
        zlib.compress(b"{}", wbits=-15) + b"x",
        zlib.compress(b"{}"),
    ],
)
def test_what_is_signed_and_no_session_is_not_known(session):
    """Only somebody with the signing key can make one: a later form of the text, for one."""
    signer = Signer(KEY)
    signed = data_of(SecretTexts(signer).write(10, bytes(16), b"{}")[0])[:HEAD_BYTES]
    assert SecretTexts(signer).read(signed_text(signer, signed + session)) is None
    good = zlib.compress(b"{}", wbits=-15)
    assert SecretTexts(signer).read(signed_text(signer, signed + good)) is not None
    assert SecretTexts(signer).read(signed_text(signer, b"\x03" + signed[1:] + good)) is None


def signed_text(signer: Signer, signed: bytes) -> str:
    return text_of(signed + signer.sign("client secret", signed))


def test_unpacking_ends_at_the_largest_session():
    signer = Signer(KEY)
    head = data_of(SecretTexts(signer).write(10, bytes(16), b"{}")[0])[:HEAD_BYTES]
    for size, is_read in ((MAX_SESSION_BYTES, True), (MAX_SESSION_BYTES + 1, False), (2**21, False)):
        text = signed_text(signer, head + zlib.compress(bytes(size), wbits=-15))
        assert len(text) < MAX_CHARACTERS
        assert (SecretTexts(signer).read(text) is not None) == is_read, size


def test_a_session_that_does_not_fit_is_kept_where_it_was_made(two, clock):
    for session in (dense(6000), dense(MAX_SESSION_BYTES - 100)):
        text, made = two[0].make(key(), session, 10)
        assert len(text) < 200
        assert two[0].find(text) == made
        assert made.session == session
        assert two[1].find(text) is None
        clock.now_s += 10
        assert two[0].find(text) is None


def test_no_text_is_longer_than_what_fits_into_a_header(store):
    lengths = set()
    for characters in range(3000, 5000, 23):
        text, made = store.make(key(), dense(characters), 10)
        assert store.find(text) == made
        lengths.add(len(text))
    assert max(lengths) <= MAX_CHARACTERS == 4096
    assert {length for length in lengths if length < 200}  # kept
    assert max(lengths) > MAX_CHARACTERS - 50


def test_small_sessions_hold_nothing_and_are_not_counted(clock, monkeypatch):
    monkeypatch.setattr(client_secrets, "_MAX_KEPT", 1)
    shared = SharedState()
    store = ClientSecrets(shared, now=clock)
    small, large = {"instructions": "Be brief. " * 1000}, dense(6000)
    texts = [store.make(key(), session, 7200)[0] for session in (small, small, large, small, small)]
    assert shared.first("SELECT count(*) FROM secrets") == (1,)
    assert [store.find(text) is not None for text in texts] == [True] * 5


def test_large_sessions_are_counted_for_each_key_and_together(store, clock, monkeypatch):
    monkeypatch.setattr(client_secrets, "_MAX_KEPT_PER_KEY", 2)
    monkeypatch.setattr(client_secrets, "_MAX_KEPT", 3)
    alice, bob, large = key(), key("bob", BOB), dense(6000)
    for _ in range(2):
        store.make(alice, large, 10)
    with pytest.raises(ApiError) as caught:
        store.make(alice, large, 10)
    assert (caught.value.status, caught.value.code) == (429, "too_many_client_secrets")
    assert "'alice'" in caught.value.message
    store.make(alice, {}, 10)
    store.make(bob, large, 600)
    with pytest.raises(ApiError) as caught:
        store.make(bob, large, 10)
    assert caught.value.message.startswith("there are 3 client secrets with large sessions")
    clock.now_s += 10
    store.make(alice, large, 10)  # those that expired count no more


def test_what_sessions_take_is_bounded(store, monkeypatch):
    with pytest.raises(ApiError) as caught:
        store.make(None, {"instructions": "x" * 2**18}, 10)
    assert (caught.value.status, caught.value.param) == (400, "session")
    with pytest.raises(ApiError):
        store.make(None, {"instructions": "\u4e2d" * 2**17}, 10)  # bytes count
    monkeypatch.setattr(client_secrets, "_MAX_KEPT_BYTES", 16_000)
    store.make(None, dense(8000), 10)
    with pytest.raises(ApiError) as caught:
        store.make(None, dense(8000), 10)
    assert (caught.value.status, caught.value.code) == (429, "too_many_client_secrets")


def test_a_key_has_a_sixteenth_of_what_large_sessions_may_take(store):
    alice, large = key(), dense(2**17)
    for _ in range(31):
        store.make(alice, large, 10)
    with pytest.raises(ApiError, match="API key 'alice'") as caught:
        store.make(alice, large, 10)
    assert (caught.value.status, caught.value.code) == (429, "too_many_client_secrets")
    store.make(key("bob", BOB), large, 10)
    store.make(alice, {}, 10)


def test_the_processes_of_one_gateway_have_one_key(tmp_path: Path):
    stores = [ClientSecrets(SharedState(tmp_path / "shared.sqlite", worker)) for worker in range(3)]
    for session in ({}, dense(6000)):
        text, made = stores[0].make(key(), session, 10)
        assert [store.find(text) for store in stores] == [made] * 3
        assert ClientSecrets().find(text) is None
