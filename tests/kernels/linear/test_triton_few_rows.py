"""The kernels for few rows without a GPU: their values in the interpreter, and when they are launched early."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interpreting import run_interpreted

from fxquant.compat import device
from fxquant.compat.private import inductor_config


def test_values_in_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_decode.py"))


def test_kernels_beside_early_ones_of_inductor_wait_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's do not wait for kernels further back than the last, which ours would let run on."""
    monkeypatch.setattr(device, "is_hopper", lambda device: True)
    assert device.launches_early(torch.device("cuda"))
    with inductor_config.patch({"triton.enable_pdl": True}):
        assert not device.launches_early(torch.device("cuda"))
