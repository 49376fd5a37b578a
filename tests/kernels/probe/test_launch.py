"""The kernels that measure on a GPU, and what is measured of one direction of an operand for both."""

from __future__ import annotations

from pathlib import Path

import torch
from interpreting import run_interpreted

from fxquant.formats import QuantSpec
from fxquant.kernels.cast import reference as cast
from fxquant.kernels.probe import reference


def test_kernels_give_what_the_reference_gives() -> None:
    """Formats, layouts, numbers that are none, and products, in Triton's interpreter."""
    run_interpreted(Path(__file__).with_name("interpreted_probe.py"))


def test_the_other_direction_of_one_scale_differs_in_its_worst_block() -> None:
    x, spec = torch.randn(40, 72) * torch.randn(72).exp(), QuantSpec.parse("per_tensor_e4m3")
    row, column = (cast.quantize(t, spec) for t in (x, x.mT))
    vector = reference.statistics(x, row, spec, reference.GROUPS)
    turned = reference.turned(vector, x.mT, column, spec)
    wanted = reference.statistics(x.mT, column, spec, reference.GROUPS)
    torch.testing.assert_close(turned, wanted, rtol=1e-6, atol=0.0)
    assert not torch.equal(turned, vector)
