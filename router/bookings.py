"""What a placed request holds on its workers until it is released: the router's own view of load, ahead of any report.

A booking is made in the same breath as the choice, so a burst of requests sees each other; it is released at the first
token (the prefill part), and at the end, an error or a cancel (the rest). Releasing twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from router.placement import Placement
from router.worker_state import WorkerState

# Most answers are far shorter than their max_tokens, which is often all that fits.
EXPECTED_OUTPUT_TOKENS = 256


class Booking:
    """One placement's share of its workers' load."""

    __slots__ = ("_clock", "_decode", "_kv_tokens", "_on_released", "_prefill", "_prefill_tokens")

    def __init__(
        self,
        placement: Placement,
        num_prompt_tokens: int,
        max_tokens: int,
        clock: Callable[[], float],
        on_released: Callable[[], None] | None = None,
    ) -> None:
        """`on_released` is called when a part is given back; it must not block."""
        now_s = clock()
        self._clock = clock
        self._on_released = on_released
        self._decode: WorkerState | None = placement.decode
        self._prefill: WorkerState | None = placement.prefill[0] if placement.prefill else placement.decode
        self._prefill_tokens = max(0, num_prompt_tokens - placement.expected_cached_tokens)
        self._kv_tokens = num_prompt_tokens + min(max_tokens, EXPECTED_OUTPUT_TOKENS)
        if not self._prefill.booked_prefills:
            self._prefill.prefill_since_s = now_s
        self._prefill.booked_prefills += 1
        self._prefill.booked_prefill_tokens += self._prefill_tokens
        self._prefill.add_recent_tokens(self._prefill_tokens, now_s)
        self._decode.booked_requests += 1
        self._decode.booked_kv_tokens += self._kv_tokens
        self._decode.last_chosen_s = self._prefill.last_chosen_s = now_s
        if self._prefill is not self._decode:
            self._prefill.booked_requests += 1

    def first_token(self) -> None:
        """The prefill is done."""
        prefill, self._prefill = self._prefill, None
        if prefill is None:
            return
        prefill.booked_prefills -= 1
        prefill.prefill_since_s = self._clock()  # the next one's turn
        prefill.booked_prefill_tokens -= self._prefill_tokens
        if prefill is not self._decode:
            prefill.booked_requests -= 1
        if self._on_released is not None:
            self._on_released()

    def release(self) -> None:
        """The request has ended, or moves to other workers."""
        self.first_token()
        decode, self._decode = self._decode, None
        if decode is not None:
            decode.booked_requests -= 1
            decode.booked_kv_tokens -= self._kv_tokens
            if self._on_released is not None:
                self._on_released()
