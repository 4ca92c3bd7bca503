"""How long each side of the handoff waits, and the error of whoever breaks its rules. Durations, never clock values."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cluster.errors import EngineFailure

MAX_RESENDS = 2
# Lists of live attempts that may lack one of ours before it counts as forgotten: one may have crossed our request.
MAX_MISSED_LISTINGS = 2
# How seldom a decode worker may ping a prefill worker that has nothing of it: then either one's silence harms nobody.
IDLE_PING_S = 10.0
# Signs of life within a peer's idle time: one or two may be late without ending an attempt.
PROGRESS_PER_IDLE = 3


class ProtocolViolation(EngineFailure):
    """A rule of the handoff does not hold: a bug on our side or on the peer's, never a client's fault."""

    code = "kv_protocol_violation"


@dataclass(frozen=True, slots=True)
class ProtocolLimits:
    """How long each side waits."""

    connect_s: float = 5.0  # for a peer's handshake
    accept_s: float = 1.0  # for Accept or Reject
    idle_s: float = 5.0  # without Frame or Progress
    # Frames travel beside the messages: after Commit, the last ones may be this far behind without a new arrival.
    arrival_grace_s: float = 0.5
    # From "stop" to "nothing of it can be written any more"; beyond it the endpoint is destroyed.
    drain_s: float = 5.0
    # A prefill worker says that it is alive at least this often through a long compute.
    progress_s: float = 1.0

    def for_peer_idle(self, idle_s: float) -> ProtocolLimits:
        """Signs of life often enough for a peer that gives up after `idle_s`; 0: it did not say."""
        if not idle_s:
            return self
        return replace(self, idle_s=idle_s, progress_s=min(self.progress_s, idle_s / PROGRESS_PER_IDLE))
