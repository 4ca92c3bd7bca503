"""Reads the routers' and workers' records from Redis for the autoscaler."""

from __future__ import annotations

from cluster.membership import POLL_INTERVAL_S, MembershipView, read_router_records
from cluster.membership_state import MembershipChange
from cluster.redis_client import RedisClient, RedisUnavailable
from deploy.autoscaler.sampler import Reports

# The view's set is as old as this at most, or nothing is known.
MAX_AGE_S = 4 * POLL_INTERVAL_S


class RedisReports:
    """Owned by whoever runs the autoscaler: `start`, later `stop`, which closes the client."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis
        self._view = MembershipView(redis, _ignore)

    def start(self) -> None:
        self._view.start()

    async def stop(self) -> None:
        await self._view.stop()
        await self._redis.close()

    async def read(self) -> Reports:
        """What Redis holds now; never raises for a Redis that does not answer."""
        try:
            routers = await read_router_records(self._redis)
        except RedisUnavailable:
            return Reports(is_fresh=False)
        age_s = self._view.age_s
        is_fresh = self._view.is_redis_healthy and age_s is not None and age_s <= MAX_AGE_S
        return Reports(is_fresh=is_fresh, routers=routers, workers=dict(self._view.workers))


def _ignore(_: MembershipChange) -> None:
    """The view is read, not heard."""
