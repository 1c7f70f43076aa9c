"""What of a written text is for the ear.

A model writes Markdown for the eye. A voice needs the words alone: not the marks, code, addresses, lines of tables,
HTML or emoji. The transcript has all of it."""

import re

_MOST_HELD = 400  # characters of a link, a row or a word whose end is still to come

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_ROW = re.compile(r"[ \t]*\|")
# Marks that begin a line: quotations, headings, items of lists, boxes to tick. The number of an item is read.
_BLOCK = re.compile(r"(?:[ \t]*(?:>|#{1,6}(?=[ \t])|[-*+\u2022](?=[ \t])(?:[ \t]+\[[ xX]\](?=[ \t]))?))*[ \t]*")
_MAY_BE_BLOCK = re.compile(r"[ \t>#*+\-_=~`|:\u2022\[\]xX]*\Z")
_EMOJI = (
    "[\u00a9\u00ae\u2122\u231a-\u23ff\u2600-\u27bf\u2b05-\u2b07\u2b1b\u2b1c\u2b50\u2b55\u3030\u303d\u3297\u3299"
    "\U0001f1e6-\U0001f1ff\U0001f300-\U0001faff]"
)
_INLINE = re.compile(
    r"(?P<escaped>\\[!-/:-@\[-`{-~])"
    r"|(?P<image>!?)\[(?P<label>[^\[\]\n]*)\]"
    r"(?:\([^()\s]*(?:\([^()\s]*\)[^()\s]*)*(?:[ \t]+[\"'(][^\n]{0,400}?[\"')])?\)|\[[^\[\]\n]*\])"
    r"|(?P<note>\[\^[^\[\]\n]+\]:?)"
    r"|(?P<address><?(?:https?://|www\.)[^\s<>]*[^\s<>.,;:!?'\")\]*_~`]/?>?)"
    r"|(?P<html></?[A-Za-z][^<>\n]*>|<!--[^\n]{0,400}?-->)"
    r"|(?P<ticks>`+)"
    r"|(?P<strong>\*{2,}|~~|_{2,20}(?!\w)|(?<!\w)_{2,20})"
    r"|(?P<stress>(?<![\w*])\*(?=[^\s*])|(?<=[^\s*])\*(?!\w)|(?<!\w)_(?=\S)|(?<=[^\s_])_(?!\w))"
    rf"|(?P<emoji>{_EMOJI}(?:[\ufe0e\ufe0f\u20e3\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f]|\u200d{_EMOJI})*"
    r"|[\ufe0e\ufe0f]?\u20e3)"
)
# Of scripts that put no blanks between words.
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3001-\u30ff\u3400-\u9fff\uff00-\uffef]")
# The beginning of what may go on beyond a blank: a link or an image, HTML.
_OPEN = re.compile(
    r"!?\[[^\[\]\n]*(?:\](?:\((?:\S*(?:[ \t]+(?:[\"'(][^\n]*)?)?)|\[[^\[\]\n]*)?)?\Z|</?[A-Za-z][^<>\n]*\Z|<!--[^\n]*\Z"
)
_BLANKS = re.compile(r"[ \t]{2,}")


class SpeakableText:
    """Takes a Markdown text in pieces, cut anywhere, and gives the words of it as soon as they are known: a word when
    the next begins, a link at its end, a row of a table at the end of its line.

    Source of the marks: CommonMark 0.31 and GitHub's tables, tasks and footnotes. Marks within words stay, as in
    `snake_case` and `2*3`; so do those that stand alone, as in "3 * 4".
    """

    def __init__(self) -> None:
        self._held = ""
        self._line_begins = True
        self._fence = ""  # that which ends the block of code
        self._before = ""  # stands for what the line has before that which is held
        self._ends_blank = False  # what was said of the line

    def add(self, text: str) -> str:
        """What can be said now; maybe nothing."""
        self._held += text
        return "".join(self._ready(is_end=False))

    def close(self) -> str:
        """What is left."""
        return "".join(self._ready(is_end=True))

    def _ready(self, is_end: bool) -> list[str]:
        said: list[str] = []
        while self._held:
            line, newline, _ = self._held.partition("\n")
            is_whole = bool(newline) or is_end
            if self._fence:
                taken = self._skip_code(line, newline, is_whole)
            elif self._line_begins:
                taken = self._begin_line(line, newline, is_whole, said)
            else:
                taken = self._go_on(line, newline, is_whole, said)
            if not taken:
                break
        return said

    def _take(self, characters: int, newline: str) -> bool:
        self._held = self._held[characters + len(newline) :]
        return bool(characters or newline)

    def _skip_code(self, line: str, newline: str, is_whole: bool) -> bool:
        """Drops a line of code. One that is not whole is only held while it may be the fence."""
        mark = line.strip()
        is_fence = self._line_begins and mark.startswith(self._fence) and not mark.strip(self._fence[0])
        if not is_whole and self._line_begins and (self._fence.startswith(mark) or is_fence):
            return False
        if is_fence:
            self._fence = ""
        self._line_begins = bool(newline)
        return self._take(len(line), newline)

    def _begin_line(self, line: str, newline: str, is_whole: bool, said: list[str]) -> bool:
        if (fence := _FENCE.match(line)) and "`" not in line[fence.end() :]:
            if not is_whole and len(line) <= _MOST_HELD:
                return False
            self._fence = fence[1]
            return self._take(len(line), newline)
        is_row = _ROW.match(line) is not None
        if not is_whole and len(line) <= _MOST_HELD and (is_row or _MAY_BE_BLOCK.match(line)):
            return False
        if is_whole and _is_rule(line):
            return self._take(len(line), newline)
        if is_row and is_whole:
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            said.append(_words(", ".join(filter(None, cells))) + newline)
            return self._take(len(line), newline)
        block = _BLOCK.match(line)
        marks = 0 if block is None else block.end()
        self._line_begins = False
        self._held = self._held[marks:]
        return True

    def _go_on(self, line: str, newline: str, is_whole: bool, said: list[str]) -> bool:
        """Says the words of a line that are whole."""
        end = len(line) if is_whole else _whole_words(line)
        text = _words(self._before + line[:end])[len(self._before) :]
        if self._ends_blank:
            text = text.lstrip(" \t")
        said.append(text + newline)
        self._ends_blank = text.endswith((" ", "\t")) if text else self._ends_blank
        if end:
            self._before = "" if line[end - 1].isspace() else "a"
        if newline:
            self._line_begins, self._before, self._ends_blank = True, "", False
        return self._take(end, newline)


def _is_rule(line: str) -> bool:
    """Whether it is drawn: below a heading, between paragraphs, below the head of a table."""
    marks = line.replace(" ", "").replace("\t", "")
    return bool(marks) and (
        set(marks) <= set("|:-") or (len(marks) > 2 and marks.strip(marks[0]) == "" and marks[0] in "*_=~")
    )


def _whole_words(line: str) -> int:
    """Characters of the words that cannot change any more, whatever follows."""
    ends = [line.rfind(" ") + 1, line.rfind("\t") + 1, *(found.end() for found in _UNSPACED.finditer(line))]
    end = max(ends)
    if len(line) - end > _MOST_HELD:
        return len(line)
    whole = [found.span() for found in _INLINE.finditer(line)]
    for begun in _OPEN.finditer(line):
        is_whole = any(begin <= begun.start() < done for begin, done in whole)
        if not is_whole and len(line) - begun.start() <= _MOST_HELD:
            end = min(end, begun.start())
    return min((begin for begin, done in whole if begin < end < done), default=end)


def _words(text: str) -> str:
    """A line, or whole words of it, without marks."""
    return _BLANKS.sub(" ", _INLINE.sub(_word, text))


def _word(found: re.Match[str]) -> str:
    if found["escaped"]:
        return found["escaped"][1]
    return _words(found["label"]) if found["label"] else ""
