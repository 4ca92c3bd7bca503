"""Devices as a roofline sees them: memory, bandwidth, arithmetic, links; every number with its source.

A prior for what was never measured, not a promise: a sweep on the machine itself replaces it. All rates are dense
(without structured sparsity) and per device.
"""

from __future__ import annotations

from dataclasses import dataclass

TB = 1e12
GB = 1e9
TFLOPS = 1e12


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one core of a processor."""

    name: str
    memory_bytes: float
    bandwidth_bytes_per_s: float
    # Arithmetic of a matrix product by the precision of its operands; bf16 is always there.
    flops: dict[str, float]
    # To a device beside it, one direction.
    link_bytes_per_s: float
    source: str

    def flops_of(self, precision: str) -> float:
        """Of the precision, or of bf16 where the device has no arithmetic for it."""
        return self.flops.get(precision, self.flops["bf16"])


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device(
            "H100",
            memory_bytes=80 * GB,
            bandwidth_bytes_per_s=3.35 * TB,
            flops={"bf16": 989 * TFLOPS, "fp8": 1979 * TFLOPS, "int8": 1979 * TFLOPS},
            link_bytes_per_s=450 * GB,
            source="NVIDIA H100 Tensor Core GPU data sheet, SXM5; NVLink 900 GB/s is both directions",
        ),
        Device(
            "H200",
            memory_bytes=141 * GB,
            bandwidth_bytes_per_s=4.8 * TB,
            flops={"bf16": 989 * TFLOPS, "fp8": 1979 * TFLOPS, "int8": 1979 * TFLOPS},
            link_bytes_per_s=450 * GB,
            source="NVIDIA H200 Tensor Core GPU data sheet, SXM; NVLink 900 GB/s is both directions",
        ),
        Device(
            "B200",
            memory_bytes=180 * GB,
            bandwidth_bytes_per_s=8.0 * TB,
            flops={"bf16": 2250 * TFLOPS, "fp8": 4500 * TFLOPS, "int8": 4500 * TFLOPS, "fp4": 9000 * TFLOPS},
            link_bytes_per_s=900 * GB,
            source="NVIDIA DGX B200 data sheet, an eighth of the system, sparse rates halved",
        ),
        Device(
            "L40S",
            memory_bytes=48 * GB,
            bandwidth_bytes_per_s=864 * GB,
            flops={"bf16": 362 * TFLOPS, "fp8": 733 * TFLOPS, "int8": 733 * TFLOPS},
            link_bytes_per_s=32 * GB,
            source="NVIDIA L40S data sheet; no NVLink: PCIe 4.0 x16, one direction",
        ),
        Device(
            "zen4-core",
            memory_bytes=12 * GB,
            bandwidth_bytes_per_s=23.9 * GB,
            flops={"bf16": 0.216 * TFLOPS},
            link_bytes_per_s=8 * GB,
            source="measured on one core of an EPYC (Zen 4, AVX-512 BF16) while its neighbour was busy: a sum over "
            "512 MB and a 1024^3 product with torch 2.13; the link is a copy in memory, read and write",
        ),
    )
}
