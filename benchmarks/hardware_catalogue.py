"""Devices as a roofline sees them: memory, bandwidth, arithmetic, links; every number with its source.

A prior for what was never measured, not a promise: a sweep on the machine itself replaces it.

Two traps in data sheets. Rates marked "with sparsity" are twice what dense weights get: NVIDIA's H100 and H200 sheets
print only those (1,979 bf16, 3,958 fp8), and pages that copy them call them dense. Link rates are mostly the sum of
both directions (NVLink 900 GB/s, PCIe 4.0 x16 64 GB/s), while KV flows in one. Here all rates are dense, per device,
and links count one direction.
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
    # To a device beside it (NVLink where there is one), to its host, and to another machine: one direction each.
    link_bytes_per_s: float
    pcie_bytes_per_s: float
    nic_bytes_per_s: float
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
            pcie_bytes_per_s=64 * GB,
            nic_bytes_per_s=50 * GB,
            source="NVIDIA H100 Tensor Core GPU data sheet, SXM5, sparse rates halved (989.4 and 1,978.9 dense); "
            "NVLink 4 and PCIe 5.0 x16, half of both directions; NIC: NVIDIA DGX BasePOD, Core Components, a "
            "ConnectX-7 of 400 Gb/s for each GPU",
        ),
        Device(
            "H200",
            memory_bytes=141 * GB,
            bandwidth_bytes_per_s=4.8 * TB,
            flops={"bf16": 989 * TFLOPS, "fp8": 1979 * TFLOPS, "int8": 1979 * TFLOPS},
            link_bytes_per_s=450 * GB,
            pcie_bytes_per_s=64 * GB,
            nic_bytes_per_s=50 * GB,
            source="NVIDIA H200 Tensor Core GPU data sheet, SXM: the H100's arithmetic with 141 GB at 4.8 TB/s, sparse "
            "rates halved; links as the H100's",
        ),
        Device(
            "B200",
            memory_bytes=180 * GB,
            bandwidth_bytes_per_s=8.0 * TB,
            flops={"bf16": 2250 * TFLOPS, "fp8": 4500 * TFLOPS, "int8": 4500 * TFLOPS, "fp4": 9000 * TFLOPS},
            link_bytes_per_s=900 * GB,
            pcie_bytes_per_s=64 * GB,
            nic_bytes_per_s=50 * GB,
            source="NVIDIA DGX B200 data sheet, an eighth of the system (1,440 GB, 64 TB/s), sparse rates halved; some "
            "sheets say 192 GB, of which 180 are usable; NVLink 5, half of 1.8 TB/s; NIC: DGX BasePOD, Core Components",
        ),
        Device(
            "L40S",
            memory_bytes=48 * GB,
            bandwidth_bytes_per_s=864 * GB,
            flops={"bf16": 362 * TFLOPS, "fp8": 733 * TFLOPS, "int8": 733 * TFLOPS},
            link_bytes_per_s=32 * GB,
            pcie_bytes_per_s=32 * GB,
            nic_bytes_per_s=25 * GB,
            source="NVIDIA L40S data sheet: 362.05 bf16 and 733 fp8 dense beside 733 and 1,466 sparse; no NVLink: PCIe "
            "4.0 x16, half of 64 GB/s; NIC: one 200 Gb/s port, an assumption",
        ),
        Device(
            "zen4-core",
            memory_bytes=12 * GB,
            bandwidth_bytes_per_s=23.9 * GB,
            flops={"bf16": 0.216 * TFLOPS},
            link_bytes_per_s=8 * GB,
            pcie_bytes_per_s=8 * GB,
            nic_bytes_per_s=1.25 * GB,
            source="measured on one core of an EPYC (Zen 4, AVX-512 BF16) while its neighbour was busy: a sum over "
            "512 MB and a 1024^3 product with torch 2.13; the link is a copy in memory, read and "
            "write; NIC: 10 Gb/s, an assumption",
        ),
    )
}
