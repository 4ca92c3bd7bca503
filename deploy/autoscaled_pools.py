"""The autoscaler on a cluster that a supervisor runs, wherever its launcher puts the processes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import StartupError
from cluster.model_files import tandem_home
from cluster.redis_client import RedisClient
from deploy.autoscaler.autoscaler import Autoscaler
from deploy.autoscaler.capacity import CapacityModel
from deploy.autoscaler.journal import Journal
from deploy.autoscaler.policy_source import PolicySource
from deploy.autoscaler.prior import planned_model
from deploy.autoscaler.reports import RedisReports
from deploy.autoscaler.sampler import Sampler
from deploy.autoscaler.signals import Pool
from deploy.cluster_plan import ClusterPlan
from deploy.config import ClusterConfig
from deploy.process_spec import ProcessSpec
from deploy.supervisor import Supervisor
from deploy.worker_fleet import WorkerFleet
from deploy.yaml_settings import YamlSettingsError
from router.policies import DEFAULT_PRIOR

# Until the first decode worker has said how many tokens it holds.
DEFAULT_KV_TOKENS = 65_536
MAX_KEPT_JOURNALS = 20

_log = logging.getLogger(__name__)


def journal_directory() -> Path:
    """Where the journals of all clusters of this user lie, newest last by name's time."""
    return tandem_home() / "scaler"


@dataclass(frozen=True, slots=True)
class AutoscaledPools:
    """Made before anything starts, so that a wrong policy file ends the start; `run` while the cluster serves."""

    policies: PolicySource
    prior: CapacityModel
    plan: ClusterPlan
    journal_path: Path

    @classmethod
    def of(cls, config: ClusterConfig, plan: ClusterPlan, cluster_name: str) -> AutoscaledPools | None:
        """None when the config has no policy. Raises `StartupError` for a wrong one: file, line, key, reason."""
        if config.autoscale is None:
            return None
        try:
            policies = PolicySource(config.autoscale)
        except YamlSettingsError as error:
            raise StartupError(str(error.problems[0])) from None
        planned = planned_model(config.autoscale)
        if planned is not None:
            _log.info("the plan beside %s is the autoscaler's prior", config.autoscale)
        return cls(policies, planned or _prior(config), plan, journal_directory() / f"{cluster_name}.jsonl")

    async def run(self, supervisor: Supervisor) -> None:
        """Until cancelled; then nothing more is started or stopped by it."""
        _forget_old_journals(self.journal_path.parent)
        reports = RedisReports(RedisClient(self.plan.redis.url, self.plan.redis.password_file))
        fleet = WorkerFleet(supervisor, self._make_worker)
        journal = Journal(self.journal_path)
        reports.start()
        try:
            await Autoscaler(fleet, reports, Sampler(self.prior), self.policies, journal).run()
        finally:
            await fleet.close()
            await reports.stop()
            journal.close()

    def _make_worker(self, pool: Pool, worker_id: str) -> ProcessSpec:
        return self.plan.make_worker(pool.value, worker_id)


def _prior(config: ClusterConfig) -> CapacityModel:
    """What serves until the routers have fitted their own timing models."""
    is_mock = config.engine == "mock"
    c0, c1, c2 = config.mock_prefill_ms if is_mock else DEFAULT_PRIOR.prefill
    alpha, beta, gamma = config.mock_decode_ms if is_mock else DEFAULT_PRIOR.decode
    return CapacityModel(
        c0_ms=c0,
        c1_ms=c1,
        c2_ms=c2,
        alpha_ms=alpha,
        beta_ms=beta,
        gamma_ms=gamma,
        kv_tokens=DEFAULT_KV_TOKENS,
        max_batch=config.decode.max_sequences,
    )


def _forget_old_journals(directory: Path) -> None:
    if directory.is_dir():
        for old in sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime)[: -MAX_KEPT_JOURNALS + 1]:
            old.unlink(missing_ok=True)
