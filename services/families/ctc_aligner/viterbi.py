"""The most likely frames of a text's words."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from services.families.ctc_aligner.net import ANY, BLANK

_NEVER = -1e30


class Scores(NamedTuple):
    """Of one sound: `letters` (frames, classes) log-probabilities, logits `begins` and `silence` (frames)."""

    letters: np.ndarray
    begins: np.ndarray
    silence: np.ndarray


class WordFrames(NamedTuple):
    begin: int
    end: int  # the first frame behind it


def place(scores: Scores, words: Sequence[Sequence[int]]) -> list[WordFrames]:
    """The frames of each of `words`, classes of letters, one after another in the most likely path.

    A path is silence, or in a word: it goes through the word's letters as connectionist temporal classification has it,
    with blanks between them, and pays for a begin where it enters a word. Where a sound has too few frames for so many
    letters, several letters share a frame's time: the words are spread evenly over the sound.
    """
    frames = len(scores.begins)
    states = _States.of(words)
    if not words:
        return []
    if frames < sum(map(_least_frames, words)):
        edges = np.linspace(0, frames, len(words) + 1).round().astype(int)
        return [WordFrames(int(edges[i]), int(edges[i + 1])) for i in range(len(words))]
    path = _best_path(scores, states)
    found = list[WordFrames]()
    for index in range(len(words)):
        at = np.flatnonzero(states.word[path] == index)
        found.append(WordFrames(int(at[0]), int(at[-1]) + 1))
    return found


def _least_frames(word: Sequence[int]) -> int:
    return len(word) + sum(a == b for a, b in itertools.pairwise(word))


class _States(NamedTuple):
    """All states in a row: silence, then of each word blank, letter, blank, ... letter, blank, silence.

    Attributes:
        kind: class of letters, or -1 for silence.
        word: which word a state is of; -1: none.
        enters: whether it is the first or second state of its word, which alone are entered from outside.
        skips: whether the state two before may be left for it: both are letters, and not the same.
    """

    kind: np.ndarray
    word: np.ndarray
    enters: np.ndarray
    skips: np.ndarray

    @classmethod
    def of(cls, words: Sequence[Sequence[int]]) -> "_States":
        kind, word, enters, skips = [-1], [-1], [False], [False]
        for index, letters in enumerate(words):
            for i, letter in enumerate(letters):
                kind += [BLANK, letter]
                enters += [i == 0, i == 0]
                skips += [False, i > 0 and letter != letters[i - 1]]
            kind += [BLANK, -1]
            enters += [False, False]
            skips += [False, False]
            word += [index] * (2 * len(letters) + 1) + [-1]
        return cls(*(np.array(each) for each in (kind, word, enters, skips)))


def _best_path(scores: Scores, states: _States) -> np.ndarray:
    """The state of each frame."""
    silent, spoken = _log_sigmoid(scores.silence), _log_sigmoid(-scores.silence)
    begins, goes_on = _log_sigmoid(scores.begins), _log_sigmoid(-scores.begins)
    letters = np.concatenate([scores.letters, scores.letters[:, 1:].max(1, keepdims=True)], axis=1)  # last: ANY
    assert letters.shape[1] == ANY + 1
    is_silent, count, frames = states.kind < 0, len(states.kind), len(silent)
    emitted = letters[:, np.maximum(states.kind, 0)] + spoken[:, None]
    emitted[:, is_silent] = silent[:, None]
    # `source` of a move is how many states before it begins: 0 stays; within a word 1, or 2 over a blank; into a
    # word's first or second state from the silence before it, or past that from the end of the word before
    rows = np.arange(count)
    moves = np.zeros((5, count), bool)
    moves[0] = True
    moves[1] = ~states.enters | (states.kind == BLANK)
    moves[1, 1:] |= states.enters[1:] & states.enters[:-1]  # blank to first letter, both of the word
    moves[2] = states.skips
    entry = np.zeros((5, count), bool)  # moves that enter a word
    first = states.enters & (states.kind == BLANK)
    second = states.enters & ~first
    entry[1] |= first  # from silence
    entry[2] |= second  # from silence, without a blank
    entry[2, 2:] |= first[2:]  # from the blank that ends the word before
    entry[3, 3:] |= second[3:]  # from there, without a blank
    entry[3, 3:] |= first[3:] & (states.word[rows[3:] - 3] >= 0)  # from the last letter of the word before
    entry[4, 4:] |= second[4:] & (states.word[rows[4:] - 4] >= 0)
    leave = is_silent & (rows > 0)  # silence behind a word: from its last blank (1) or its last letter (2)
    moves[2] |= leave
    moves |= entry
    moves[:, 0] = [True, False, False, False, False]
    score = np.full(count, _NEVER)
    score[0] = emitted[0, 0]
    score[1:3] = emitted[0, 1:3] + begins[0]
    came = np.zeros((frames, count), np.int8)
    padded = np.full(count + 4, _NEVER)
    closed = np.where(moves, 0.0, _NEVER)
    for t in range(1, frames):
        padded[4:] = score
        before = np.stack([padded[4 - back : 4 - back + count] for back in range(5)])
        cost = np.where(entry, begins[t], np.where(is_silent, 0.0, goes_on[t]))
        total = before + closed + cost
        came[t] = total.argmax(0)
        score = np.take_along_axis(total, came[t][None].astype(np.int64), 0)[0] + emitted[t]
    ends = [state for state in (count - 1, count - 2, count - 3) if state > 0]
    state = max(ends, key=lambda each: score[each])
    path = np.empty(frames, np.int64)
    for t in range(frames - 1, -1, -1):
        path[t] = state
        state -= int(came[t, state])
    return path


def _log_sigmoid(logits: np.ndarray) -> np.ndarray:
    return -np.logaddexp(0.0, -logits)
