"""Workers of several processes: they meet those of one, they end as one, and a launcher brings them back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from tandem.v1 import worker_pb2, worker_pb2_grpc

from cluster.python_modules import python_command
from cluster.rpc import open_channel
from cluster.settings_flags import settings_to_arguments
from deploy.launcher import LocalLauncher
from deploy.probes import worker_probe
from deploy.process_spec import ProcessSpec, Stage
from deploy.restart_policy import RestartLimits
from deploy.supervised_process import ProcessState
from deploy.supervisor import Supervisor
from engine.tensor_parallel.followers import EXIT_RANK_LOST
from tests.engine.steps import tokens_of_one_process
from tests.engine.tiny_models import VOCAB, random_model, save_safetensors
from tests.integration.worker_processes import SECURITY, Router, all_blocks_are_back, fleet_in

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NUM_TOKENS = 6
PROMPT_LENGTHS = (17, 70)
BACK_TIMEOUT_S = 60.0
# From the kill of a rank to the end of its worker; a second on a machine of one's own.
END_TIMEOUT_S = 60.0
RESTART_TIMEOUT_S = 120.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_safetensors(random_model("llama"), tmp_path / "model")


async def rank_pids(address: str) -> list[int]:
    async with open_channel(address, SECURITY) as channel:
        status = await worker_pb2_grpc.WorkerAdminStub(channel).GetStatus(worker_pb2.GetStatusRequest(), timeout=30)
    return [int(pid) for pid in status.details["rank_pids"].split()]


async def until(is_reached: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_reached():
        assert time.monotonic() < deadline_s, f"not reached in {timeout_s} s: {what}"
        await asyncio.sleep(0.02)


def are_gone(pids: list[int]) -> bool:
    """A process whose parent was killed is reaped by somebody else, sooner or later: a zombie is gone."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                return False
    return True


async def test_workers_of_two_processes_and_of_one_hand_over_to_each_other(model: Path, tmp_path: Path) -> None:
    """And one whose rank is killed ends at once, with all its ranks."""
    draw = np.random.default_rng(1)
    prompts = [draw.integers(2, VOCAB, length).tolist() for length in PROMPT_LENGTHS]
    expected = tokens_of_one_process(model, prompts, NUM_TOKENS)
    async with fleet_in(tmp_path, model) as fleet:
        options = {"backend": "torch", "num_kv_blocks": 32}
        prefill_of_two, decode_of_one = await asyncio.gather(
            fleet.start("prefill", "prefill-two", tensor_parallel=2, **options),
            fleet.start("decode", "decode-one", **options),
        )
        prefill_of_one, decode_of_two = await asyncio.gather(
            fleet.start("prefill", "prefill-one", **options),
            fleet.start("decode", "decode-two", tensor_parallel=2, **options),
        )
        for prefill, decode in ((prefill_of_two, decode_of_one), (prefill_of_one, decode_of_two)):
            async with Router(decode) as router:
                for index, prompt in enumerate(prompts):
                    answer = await router.generate(f"r{index}", prompt, NUM_TOKENS, [prefill], deadline_ms=60_000)
                    assert answer.failure is None
                    assert answer.token_ids == expected[index]
                    assert answer.last.timeline.prefill_worker_id == prefill.settings.worker_id
                    assert answer.last.timeline.kv_frames > 0
        for worker in fleet.workers:
            await worker.wait_for(all_blocks_are_back, BACK_TIMEOUT_S, "blocks are back")

        own_pid, follower_pid = await rank_pids(decode_of_two.address)
        assert own_pid == decode_of_two.process.pid
        os.kill(follower_pid, signal.SIGKILL)
        assert await asyncio.to_thread(decode_of_two.process.wait, END_TIMEOUT_S) == EXIT_RANK_LOST
        assert f"rank 1 (process {follower_pid}) was killed by signal 9" in decode_of_two.log()

        follower = (await rank_pids(prefill_of_two.address))[1]
        prefill_of_two.kill()
        await until(lambda: are_gone([follower]), END_TIMEOUT_S, "the rank of a killed worker ends")
        for worker in (prefill_of_one, decode_of_one):
            assert await asyncio.to_thread(worker.stop) == 0


async def test_worker_that_loses_a_rank_is_started_again_and_a_stop_leaves_no_rank(model: Path, tmp_path: Path) -> None:
    async with fleet_in(tmp_path, model) as fleet:
        settings = fleet.settings(
            "decode", "decode-0", backend="torch", num_kv_blocks=8, tensor_parallel=2, parent_pid=0
        )
        spec = ProcessSpec(
            name="decode-0",
            stage=Stage.WORKER,
            command=python_command("decode_worker", *settings_to_arguments(settings)),
            probe=worker_probe(lambda: settings.listen, SECURITY),
        )
        (tmp_path / "logs").mkdir()
        limits = RestartLimits(first_delay_s=0.01, max_delay_s=0.05, max_crashes=3)
        supervisor = Supervisor([spec], LocalLauncher(tmp_path / "logs"), lambda process: None, limits)
        (process,) = supervisor.processes
        try:
            await asyncio.wait_for(supervisor.start(), RESTART_TIMEOUT_S)
            first_pids = await rank_pids(settings.listen)
            os.kill(first_pids[1], signal.SIGKILL)
            await until(lambda: process.restarts == 1, END_TIMEOUT_S, "the worker is started again")
            await until(lambda: process.state is ProcessState.READY, RESTART_TIMEOUT_S, "it is ready again")
            second_pids = await rank_pids(settings.listen)
            assert are_gone(first_pids)
            assert not set(first_pids) & set(second_pids)
        finally:
            await supervisor.stop()
        assert are_gone(second_pids)
