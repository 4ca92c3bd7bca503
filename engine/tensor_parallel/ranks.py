"""What the ranks of a sharded model do together: sums and gathers, by gloo between CPUs and by NCCL between GPUs.

Gloo's connections stay on this host's loopback interface. Whoever waits for a rank that is gone or silent gets an
exception: at once when its connections break, after the timeout otherwise.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed

from cluster.errors import StartupError

# Ranks compute the same amount, so they wait for each other by little more than what the machine does beside them.
COLLECTIVE_TIMEOUT_S = 60.0

distributed: Any = torch.distributed  # its stubs lack most of what is used here


class Ranks(Protocol):
    """This process among the ranks. Every rank calls the same in the same order."""

    rank: int
    size: int

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """`part` itself, which then holds the sum over all ranks."""
        ...

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """At rank 0 the parts `[rows, columns]` side by side, in order of rank; elsewhere `part`."""
        ...


class ProcessRanks:
    """Ranks in processes of their own. Used by one thread of each."""

    def __init__(
        self,
        rank: int,
        size: int,
        rendezvous: Path,
        device: torch.device,
        timeout_s: float = COLLECTIVE_TIMEOUT_S,
    ) -> None:
        """Waits for the others. `rendezvous`: a file that only they can reach, which must not be there beforehand.

        Raises `StartupError` when they do not come.
        """
        self.rank = rank
        self.size = size
        store = distributed.FileStore(str(rendezvous), size)
        timeout = timedelta(seconds=timeout_s)
        store.set_timeout(timeout)
        try:
            self._group = _open_group(store, rank, size, device, timeout)
            self.sum(torch.zeros(1, device=device))  # connects what connects at first use
        except RuntimeError as error:
            raise StartupError(f"the ranks cannot connect: {error}", param="tensor_parallel") from error

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        self._group.allreduce([part]).wait()
        return part

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else []
        self._group.gather([parts] if parts else [], [part], distributed.GatherOptions()).wait()
        return torch.cat(parts, dim=1) if parts else part


def _open_group(store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    """A group of its own, apart from torch's global one, which is one for each process."""
    if device.type == "cuda":
        nccl = distributed.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timeout
        return nccl(store, rank, size, options)
    gloo = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(interface="lo")]
    options._timeout = timeout
    return gloo(store, rank, size, options)
