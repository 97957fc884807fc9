"""Data sheets of the accelerators that a recipe can name."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    """One GPU; `tflops` is its peak in dense bfloat16 (V100, T4: float16)."""

    memory_gb: float
    tflops: float
    bandwidth_gb_s: float

    @property
    def flops(self) -> float:
        return self.tflops * 1e12

    def times(self, count: int) -> "Accelerator":
        """`count` of these GPUs as one."""
        return Accelerator(self.memory_gb * count, self.tflops * count, self.bandwidth_gb_s * count)


ACCELERATORS: dict[str, Accelerator] = {
    "H200": Accelerator(141, 989, 4800),
    "H100": Accelerator(80, 989, 3350),
    "A100": Accelerator(40, 312, 1555),
    "A100_80GB": Accelerator(80, 312, 2039),
    "RTX_PRO_6000": Accelerator(96, 252, 1792),
    "L40S": Accelerator(48, 362, 864),
    "L4": Accelerator(24, 121, 300),
    "A10G": Accelerator(24, 70, 600),
    "V100": Accelerator(16, 125, 900),
    "T4": Accelerator(16, 65, 320),
}
