"""The work of one matmul or attention: its kernels, with their times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

NOTHING_MULTIPLIES = "nothing multiplies these formats on"
"""The beginning of the reason why a matmul stays in high precision on a card without rates."""


@dataclass(frozen=True)
class Work:
    """A GEMM or a cast of one matmul: its kernel, and microseconds without and with quantization.

    A quantized GEMM is `emulated` if its operands are dequantized and multiplied in high precision.
    """

    what: str
    kernel: str
    unquantized: float | None = None
    quantized: float | None = None
    emulated: bool | None = None


@dataclass(frozen=True)
class Estimate:
    """All work of one matmul or attention.

    `reference` is the reason why an attention holds its scores in memory, `emulated_on` a card without rates on which
    no quantized GEMM runs as such.
    """

    work: tuple[Work, ...]
    reference: str = ""
    emulated_on: str = ""

    @property
    def unquantized(self) -> float | None:
        """Microseconds in high precision, or None if a part has no rate."""
        return _sum(work.unquantized for work in self.work)

    @property
    def quantized(self) -> float | None:
        """Microseconds with the quantization that was decided."""
        return _sum(work.quantized for work in self.work)

    @property
    def longest(self) -> float:
        """The longer of both times; 0 without times."""
        return max(self.unquantized or 0.0, self.quantized or 0.0)

    @property
    def slower(self) -> bool:
        """True if quantization is estimated to cost more than it saves."""
        if self.reference or self.emulated_on:
            return True
        return self.unquantized is not None and self.quantized is not None and self.quantized > self.unquantized

    def __str__(self) -> str:
        if self.reference:
            return f"no FP8 kernel: {self.reference}"
        if self.emulated_on:
            return f"{NOTHING_MULTIPLIES} {self.emulated_on}, where it could only be slower"
        sides = ((self.unquantized, "in high precision"), (self.quantized, "quantized"))
        return ", ".join(f"{'no measured time' if us is None else f'{us:.3g} us'} {how}" for us, how in sides)


def _sum(times: Iterable[float | None]) -> float | None:
    parts = list(times)
    return None if None in parts else sum(filter(None, parts), 0.0)
