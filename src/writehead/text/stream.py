"""Text of a completion as its tokens arrive: byte-exact, and cut at stop strings.

Bytes go through an incremental UTF-8 decoder, which keeps a character back until it is whole; characters go through an
Aho-Corasick automaton (Aho and Corasick 1975), whose depth is the length of the longest suffix that a stop string may
still complete. That suffix, and nothing else, is held back. Work per token does not depend on what came before.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence

from writehead.errors import UsageError
from writehead.text.tokenizer import Tokenizer

_LOOKBACK = 8  # bytes of prompt that are enough to see whether it ends inside a character (at most 4)


class StopStrings:
    """An automaton that recognizes any of several strings, one character at a time. Immutable; states are integers."""

    def __init__(self, stop: Sequence[str]) -> None:
        for string in stop:
            if not isinstance(string, str) or not string:
                raise UsageError(f"A stop string must be text of at least one character, not {string!r}; leave it out.")
        self.strings = frozenset(stop)
        self._edges: list[dict[str, int]] = [{}]
        self._fail = [0]
        self.depth = [0]
        self.match: list[str | None] = [None]
        for string in stop:
            self._insert(string)
        self._link()

    def step(self, state: int, char: str) -> int:
        """The state after `char`: the longest suffix of the text so far that begins a stop string."""
        while state and char not in self._edges[state]:
            state = self._fail[state]
        return self._edges[state].get(char, 0)

    def _insert(self, string: str) -> None:
        state = 0
        for char in string:
            if char not in self._edges[state]:
                self._edges[state][char] = len(self._edges)
                self._edges.append({})
                self._fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
            state = self._edges[state][char]
        self.match[state] = string

    def _link(self) -> None:
        todo = deque(self._edges[0].values())
        while todo:
            state = todo.popleft()
            for char, child in self._edges[state].items():
                self._fail[child] = self.step(self._fail[state], char)
                self.match[child] = self.match[child] or self.match[self._fail[child]]
                todo.append(child)


class TextStream:
    """Turns token ids into text, piece by piece.

    The pieces joined are `tokenizer.decode` of all ids, up to a stop string. The match that completes first wins, the
    longest of those that complete together; the text ends before it, or after it with `include_stop`. A special token
    that is not shown ends the text if its spelling is a stop string. A match that completes within the first
    `min_tokens` ids is no match. `prompt_ids` is what the ids continue: with it a leading space is kept, and a
    character that the prompt leaves unfinished is finished here, unless a token that is not shown stands between. One
    object per sequence, not shared between threads.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        skip_special: bool = True,
        include_stop: bool = False,
        prompt_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = StopStrings(stop)
        self._hidden = tokenizer.special_ids if skip_special else frozenset[int]()
        self._include_stop = include_stop
        self._num_unstoppable = min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tail = self._tail(prompt_ids)
        self._decoder.decode(tail)  # leaves the unfinished character, if any, in the decoder
        self._at_start = tokenizer.strips_leading_space and self._hidden.issuperset(prompt_ids)
        self._state = 0
        self._held = ""
        self._chunks: list[str] = []
        self.stopped: str | None = None

    @property
    def text(self) -> str:
        """Everything that was returned so far."""
        return "".join(self._chunks)

    def push(self, token_id: int) -> str:
        """The text that is certain now that `token_id` has come; nothing once a stop string has matched."""
        if self.stopped is not None:
            return ""
        self._num_unstoppable -= 1
        if token_id in self._hidden:
            return self._push_hidden(token_id)
        data = self._tokenizer.token_bytes(token_id)
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._emit(self._scan(self._decoder.decode(data)))

    def finish(self) -> str:
        """The text that was held back. Call it once, after the last token."""
        if self.stopped is not None:
            return ""
        text = self._scan(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return self._emit(text + held)

    def _push_hidden(self, token_id: int) -> str:
        spelling = self._tokenizer.spelling(token_id)
        if spelling not in self._stops.strings or self._num_unstoppable >= 0:
            return ""
        text = self.finish()
        if self.stopped is None:
            self.stopped = spelling
            text += self._emit(spelling if self._include_stop and spelling else "")
        return text

    def _scan(self, text: str) -> str:
        """What of the held text and `text` can be shown; keeps the rest and sets `stopped` at a match."""
        stops, state = self._stops, self._state
        if not stops.strings:
            return text
        text, start = self._held + text, len(self._held)
        for at in range(start, len(text)):
            state = stops.step(state, text[at])
            match = stops.match[state]
            if match is not None and self._num_unstoppable < 0:
                self.stopped, self._held = match, ""
                return text[: at + 1 if self._include_stop else at + 1 - len(match)]
        self._state = state
        shown = len(text) - stops.depth[state]
        self._held = text[shown:]
        return text[:shown]

    def _emit(self, text: str) -> str:
        if text:
            self._chunks.append(text)
        return text

    def _tail(self, prompt_ids: Sequence[int]) -> bytes:
        """The last bytes of the prompt's text, enough to tell whether it ends inside a character."""
        tail = b""
        for token_id in reversed(prompt_ids):
            if token_id in self._hidden or len(tail) >= _LOOKBACK:
                break
            tail = self._tokenizer.token_bytes(token_id) + tail
        return tail[-_LOOKBACK:]
