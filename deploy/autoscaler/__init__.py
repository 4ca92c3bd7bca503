"""Keeps the ratio of the two pools matched to the traffic.

    signals ──> decide(snapshot, state, policy) ──> decision, next state ──> launcher

`decide` is pure: the live loop, the simulator and the tests drive the same function; only the clock differs.
"""
