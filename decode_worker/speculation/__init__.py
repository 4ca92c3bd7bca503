"""Speculative decoding: drafters guess the next tokens, one verification step of the target keeps what it agrees with.

    drafter.propose ──> Draft ──> one engine step over its rows ──> verify ──> accepted run ──> drafter.extend

`gate` decides when guessing pays. The target alone decides what is said: with match verification the tokens are those
of decoding without speculation, to the last one.
"""
