"""Asking a process once whether it is ready to serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import grpc.aio
import httpx
from tandem.v1 import worker_pb2, worker_pb2_grpc

from cluster.redis_client import RedisClient, RedisUnavailable
from cluster.rpc import open_channel
from cluster.rpc_security import RpcSecurity
from deploy.process_spec import Probe

PROBE_CALL_TIMEOUT_S = 1.0


def redis_probe(url: str, password_file: Path | None) -> Probe:
    """Ready when it answers a ping as the cluster's own user."""

    async def probe() -> bool:
        client = RedisClient(url, password_file)
        try:
            await client.run(lambda redis: redis.ping())
        except RedisUnavailable:
            return False
        finally:
            await client.close()
        return True

    return probe


def worker_probe(find_target: Callable[[], str | None], security: RpcSecurity) -> Probe:
    """Ready when it reports its status and takes requests: the model is loaded and it does not drain.

    `find_target`: where it listens by now; None while nobody knows.
    """

    async def probe() -> bool:
        target = find_target()
        if target is None or not _may_listen(target):
            return False
        # A channel of its own: one that failed before would wait before it connects again.
        async with open_channel(target, security) as channel:
            admin = worker_pb2_grpc.WorkerAdminStub(channel)
            try:
                status = await admin.GetStatus(worker_pb2.GetStatusRequest(), timeout=PROBE_CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError:
                return False
        return not status.load.draining

    return probe


def _may_listen(target: str) -> bool:
    """A Unix socket that is not there yet need not be dialled."""
    return not target.startswith("unix:") or Path(target.removeprefix("unix:")).exists()


def router_probe(url: str) -> Probe:
    """Ready when requests could be served now."""

    async def probe() -> bool:
        answer = await _get(f"{url}/readyz")
        return answer is not None and answer.status_code == httpx.codes.OK

    return probe


def pools_probe(url: str, pools: Mapping[str, int]) -> Probe:
    """Ready when the router at `url` could place requests on this many workers of each role."""

    async def probe() -> bool:
        answer = await _get(f"{url}/readyz")
        if answer is None or answer.status_code != httpx.codes.OK:
            return False
        routable = answer.json()["pools"]
        return all(routable.get(role, 0) >= count for role, count in pools.items())

    return probe


async def _get(url: str) -> httpx.Response | None:
    # No proxy of the environment stands between us and our own child, whose certificate names another address than the
    # one that it is asked at here; and nothing is told to it.
    async with httpx.AsyncClient(trust_env=False, verify=False, timeout=PROBE_CALL_TIMEOUT_S) as client:  # noqa: S501
        try:
            return await client.get(url)
        except httpx.TransportError:
            return None
