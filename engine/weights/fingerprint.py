"""A model's fingerprint: workers with equal ones may share KV. Fast, because every start computes it.

It covers the config, every tensor's name, shape and element type, and the bytes of three rows of each tensor: two
checkpoints of one architecture differ in it, without reading gigabytes. It is no protection against a forger.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable

from engine.model_config import ModelConfig

FINGERPRINT_BYTES = 16
# Of one sampled row: rows of large models have tens of kilobytes, and their start tells them apart.
MAX_SAMPLE_BYTES = 4096


def fingerprint(
    config: ModelConfig, tensors: Iterable[tuple[str, tuple[int, ...], str]], row: Callable[[str, int], bytes]
) -> str:
    """32 hexadecimal digits. `tensors` gives (name, shape, element type); `row(name, i)` the bytes of one row."""
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES)
    described = dataclasses.asdict(dataclasses.replace(config, fingerprint="", name=""))
    if config.mixture is None:
        del described["mixture"]  # dense models had fingerprints before there were mixtures: drafters name them
    digest.update(json.dumps(described, sort_keys=True).encode())
    for name, shape, kind in sorted(tensors):
        digest.update(f"{name} {shape} {kind}".encode())
        num_rows = shape[0] if len(shape) > 1 else 1
        for index in sorted({0, num_rows // 2, num_rows - 1}):
            digest.update(row(name, index)[:MAX_SAMPLE_BYTES])
    return digest.hexdigest()
