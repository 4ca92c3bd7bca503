"""How a sender writes its ring: through the caches or past them, whichever took less time lately. Pure.

    ─── the kind in use ───┬─ a trial of the other ─┬─── the faster of the two ───┬─ a trial ...

Where both processes run on cores that share their last cache, the receiver finds there what the sender wrote, and
through the caches is faster. Where they do not, every line of the ring changes its cache twice with every frame: on
Zen 4 the same sender wrote 15 GB/s through the caches one minute and 3 the next, and 18 past them. No process is told
where it runs, least of all in a virtual machine, and it changes while it runs; so it is measured.
"""

from __future__ import annotations

import statistics
from collections import deque

# Frames below: what a push costs by itself hides how it writes.
MIN_MEASURED_BYTES = 64 * 1024
# The last ones tell how fast a kind is: a median of them is no neighbour's doing.
MAX_SAMPLES = 16
# In lengths of the ring. The first of each phase still meets lines that the other kind left behind.
SETTLING_RINGS, TRIAL_RINGS, FIRST_RINGS, USE_RINGS = 1, 2, 2, 32
# The other kind must be that much faster to be preferred: measurements are noisy.
PREFERRED_BELOW = 0.9


class RingStores:
    """Owned by one sender."""

    def __init__(self, ring_bytes: int) -> None:
        self.is_past_caches = False
        self._ring_bytes = ring_bytes
        self._use_rings = FIRST_RINGS  # the first trial comes soon: while the link is measured
        self._is_trial = False
        self._phase_bytes = 0
        self._samples: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._used_s_per_byte = 0.0

    def wrote(self, num_bytes: int, duration_s: float) -> None:
        """One frame of this size was written in the kind that `is_past_caches` says."""
        if num_bytes >= MIN_MEASURED_BYTES and self._phase_bytes >= SETTLING_RINGS * self._ring_bytes:
            self._samples.append(duration_s / num_bytes)
        self._phase_bytes += num_bytes
        num_rings = TRIAL_RINGS if self._is_trial else self._use_rings
        if self._phase_bytes >= num_rings * self._ring_bytes and self._samples:
            self._end_phase(statistics.median(self._samples))

    def _end_phase(self, s_per_byte: float) -> None:
        if not self._is_trial:
            self._used_s_per_byte = s_per_byte
            self.is_past_caches = not self.is_past_caches
        elif s_per_byte >= PREFERRED_BELOW * self._used_s_per_byte:
            self.is_past_caches = not self.is_past_caches
        self._is_trial = not self._is_trial
        self._use_rings = USE_RINGS if not self._is_trial else self._use_rings
        self._phase_bytes = 0
        self._samples.clear()
