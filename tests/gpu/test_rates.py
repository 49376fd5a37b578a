"""The rates that `fxquant rates` measures of a GPU: none is beyond a copy's, or beyond tensor cores."""

from __future__ import annotations

import pytest

from fxquant.bench import rates as measuring

pytestmark = pytest.mark.gpu


def test_rates_are_within_what_a_card_can_do() -> None:
    card = measuring.Card("cuda", measuring.in_cuda_graphs, size=4096, lengths=(1024, 4096))
    rates = measuring.measure(card)
    assert 0.5 < rates.amax < 1.2, "the kernel that reads a tensor in memory"
    for family, shares in rates.casts.items():
        least = 0.04 if family.startswith("nvfp4") else 0.2  # transformed and emulated, it is arithmetic, not memory
        assert all(least < share < 1.2 for share in shares), (family, shares)
    for kernel, rate in rates.gemm.items():
        assert all(50 < tflops < 20000 for tflops in rate[:3]) and 0.05 < rate.read <= 1, (kernel, rate)
