"""`engine.tensor_parallel.ranks`: sums and gathers between threads, and no wait without an end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from cluster.errors import StartupError
from engine.tensor_parallel.ranks import ProcessRanks

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_is_everywhere_and_gather_at_rank_0(dtype: torch.dtype, tmp_path: Path) -> None:
    def work(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        ranks = ProcessRanks(rank, 3, tmp_path / "rendezvous", CPU)
        with torch.inference_mode():
            part = torch.full((2, 2), float(rank + 1), dtype=dtype)
            return ranks.sum(part.clone()), ranks.gather(part)

    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(work, range(3), timeout=60))
    assert all(total.tolist() == [[6.0, 6.0]] * 2 for total, _ in results)
    assert results[0][1].tolist() == [[1.0, 1.0, 2.0, 2.0, 3.0, 3.0]] * 2


def test_s_b3_ranks_listen_on_loopback_alone(tmp_path: Path) -> None:
    before = set(psutil.Process().net_connections())
    with ThreadPoolExecutor(2) as threads:
        ranks = list(threads.map(lambda rank: ProcessRanks(rank, 2, tmp_path / "r", CPU), range(2), timeout=60))
        opened = set(psutil.Process().net_connections()) - before
    assert len(ranks) == 2
    assert opened, "gloo connects in another way: where does it listen now?"
    assert {connection.laddr.ip for connection in opened} <= {"127.0.0.1", "::1"}


def test_rank_that_gives_nothing_ends_the_wait(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        ranks = list(threads.map(lambda rank: ProcessRanks(rank, 2, tmp_path / "r", CPU, 3.0), range(2), timeout=60))
        with pytest.raises(RuntimeError, match=r"(?i)time"):
            ranks[0].sum(torch.ones(1))


def test_ranks_that_do_not_come_are_an_error_of_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="the ranks cannot connect"):
        ProcessRanks(0, 2, tmp_path / "rendezvous", CPU, 0.2)
