"""Token ids to text while they are generated: never half a character, never an exception.

A token is a piece of bytes. What is not yet a whole character waits for the next token; bytes that can never become one
are U+FFFD at once; what is still incomplete when the text ends is U+FFFD then. So the pieces joined are always
`all_bytes.decode("utf-8", "replace")`, and a token costs O(its bytes), however long the text is.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one growing sequence."""

    __slots__ = ("_decode", "_hidden_ids", "_token_bytes")

    def __init__(self, token_bytes: Sequence[bytes], hidden_ids: Collection[int] = ()) -> None:
        """`hidden_ids` (special tokens) have no text."""
        self._token_bytes = token_bytes
        self._hidden_ids = hidden_ids
        self._decode = _new_decoder("replace").decode

    def push(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete; empty when they end within one."""
        hidden, table = self._hidden_ids, self._token_bytes
        return self._decode(b"".join([table[token_id] for token_id in token_ids if token_id not in hidden]))

    def finish(self) -> str:
        """U+FFFD for a character that never became whole; empty when there is none."""
        return self._decode(b"", True)
