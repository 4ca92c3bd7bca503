"""A cluster on a virtual clock: the real router's decisions, engine scheduler and autoscaler; modelled time.

    arrivals ─> front (admission, index, placement, bookings: `router`) ─> decode worker ─> prefill worker
    steps: `engine.scheduler` and `engine.block_pool`, as long as the timing model says; scaling: `deploy.autoscaler`

What is modelled and not run: the time of a step, of a transfer and of a start; sockets, Redis and processes. Every row
that comes out of it is labelled `simulated`.
"""
