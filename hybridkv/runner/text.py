"""Token ids become text as they come."""

from typing import Protocol


class Tokenizer(Protocol):
    """What the runners need of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, special tokens added."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        ...


class TextStream:
    """Incremental text of one sequence, cut before the first stop text.

    A token may be part of a character or change the spacing of its neighbour, so a small window of tokens is decoded
    again each time, and text that could be the start of a stop text is held back.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._token_ids: list[int] = []
        self._window_start = 0
        self._emitted_end = 0
        self._pending = ""
        self.text = ""
        self.stopped = False

    def fresh(self) -> "TextStream":
        """Return a stream of the same kind for another sequence."""
        return TextStream(self._tokenizer, self._stop)

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is certain now."""
        self._token_ids.append(token_id)
        before = self._decode(self._token_ids[self._window_start : self._emitted_end])
        after = self._decode(self._token_ids[self._window_start :])
        if len(after) <= len(before) or after.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._window_start, self._emitted_end = self._emitted_end, len(self._token_ids)
        return self._release(after[len(before) :])

    def finish(self) -> str:
        """Return the text that was held back."""
        if self.stopped:
            return ""
        before = self._decode(self._token_ids[self._window_start : self._emitted_end])
        rest = self._decode(self._token_ids[self._window_start :])[len(before) :]
        self._emitted_end = self._window_start = len(self._token_ids)
        certain = self._release(rest)
        held, self._pending = self._pending, ""
        self.text += held
        return certain + held

    def _release(self, new: str) -> str:
        self._pending += new
        found = [index for index in (self._pending.find(stop) for stop in self._stop) if index >= 0]
        if found:
            self.stopped = True
            certain, self._pending = self._pending[: min(found)], ""
        else:
            held = max((_overlap(self._pending, stop) for stop in self._stop), default=0)
            split = len(self._pending) - held
            certain, self._pending = self._pending[:split], self._pending[split:]
        self.text += certain
        return certain

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
