"""Rates by a timer that takes as long as a known card would: what is measured is that card; and how they are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fxquant.__main__ import main
from fxquant.bench import rates as measuring
from fxquant.cost import kept
from fxquant.cost.gemms import busy_us
from fxquant.cost.rates import RATES
from fxquant.errors import FxQuantWarning
from fxquant.formats import QuantSpec
from fxquant.kernels.linear.choice import GemmKernel

H100 = RATES["NVIDIA H100 80GB HBM3"]
N = 256


def takes(what: str) -> float:
    """Microseconds of a probe on an H100, by the formulas of the estimate."""
    elements = 2 * N * N
    starts = {"launch": H100.launch, "gemm_start": H100.gemm_start, "amax_start": H100.amax_start}
    if what in starts:
        return starts[what]
    if what == "lines_start":
        return H100.launch + H100.lines_start
    if what == "copy":
        return 4 * elements / H100.copy / 1e6
    if what == "amax":
        return H100.amax_start + 2 * elements / (H100.copy * H100.amax) / 1e6
    kernel = next((kernel for kernel in GemmKernel if what.startswith(f"{kernel}, ")), None)
    if kernel or what.startswith("bf16 GEMM"):
        rate, itemsize = (H100.gemm[kernel], 1) if kernel else (H100.bf16, 2)
        if "16 rows" in what:
            return H100.gemm_start + (itemsize * (16 * N + N * N) + 32 * N) / (H100.copy * rate.read) / 1e6
        tflops = rate.dgrad if "float32" in what else rate.fprop
        return H100.gemm_start + busy_us(replace(H100, multiprocessors=1), rate.smallest, tflops, 1, N, N, N)
    if " cast, " in what:
        family, directions = what.split(" cast, ")
        spec, by_row = QuantSpec.parse(measuring.CASTS[family]), family == "per_row"
        count = 2 if directions == "both" else 1
        share = H100.casts[family].both if count == 2 else H100.casts[family].columnwise
        us = H100.launch + elements * (2 + count * spec.row.bytes_per_element) / (H100.copy * share) / 1e6
        return us + (H100.lines_start + 2 * elements / H100.copy / 1e6) * by_row
    return 100.0


@pytest.fixture
def card() -> measuring.Card:
    def timer(what: str, calls: Sequence[Callable[[], object]]) -> float:
        return takes(what)

    return measuring.Card("cpu", timer, size=N, lengths=(32, 64), find=lambda *_: lambda: None)


def test_what_is_measured_is_the_card(card: measuring.Card) -> None:
    rates = measuring.measure(card)
    assert rates.copy == pytest.approx(H100.copy) and rates.lines_start == pytest.approx(H100.lines_start)
    for before, after in ((H100.bf16, rates.bf16), *((H100.gemm[k], rates.gemm[k]) for k in measuring.GEMMS)):
        assert after[:4] == pytest.approx(before[:4], rel=0.01)
    for family, rate in rates.casts.items():
        assert rate == pytest.approx(H100.casts[family], rel=0.01), family
    assert "NVIDIA" not in rates.source and not rates.attention, "two lengths that take as long say nothing"


def test_a_cast_that_takes_less_than_its_amaxes_has_no_rate(card: measuring.Card) -> None:
    slow = {"amax": 1e6}
    card.timer = lambda what, calls: slow.get(what) or takes(what)
    rates = measuring.measure(card)
    assert rates.casts.keys() == measuring.CASTS.keys() - {"per_row"}
    assert list(card.missing) == ["per_row cast, both"]


def test_what_has_no_kernel_or_no_time_is_named(card: measuring.Card) -> None:
    card.find = lambda kernel, *_: None if kernel is GemmKernel.TILES else lambda: None
    ticks = iter(range(1000))
    card.clock, card.until = lambda: float(next(ticks)), 20.0
    rates = measuring.measure(card)
    assert GemmKernel.TILES not in rates.gemm and GemmKernel.PER_ROW in rates.gemm
    assert card.missing[f"{GemmKernel.TILES}, large"] == "another kernel is taken on this card"
    assert "no time was left" in card.missing.values() and "not measured: " in rates.source
    assert "not measured: " in " ".join(measuring.text("a card", rates, card.missing).split("   "))


def test_rates_are_kept_for_the_card(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user's come before those that ship; a file of something else is told once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept.rates_of("NVIDIA RTX 9999") is None and "NVIDIA H200" in kept.known_cards()
    text = kept.kept_text()
    kept.keep("NVIDIA RTX 9999", H100)
    assert kept.rates_of("NVIDIA RTX 9999") == H100 and kept.find_card("9999") == "NVIDIA RTX 9999"
    assert kept.kept_text() != text
    faster = replace(H100, copy=9.0)
    path = kept.keep("NVIDIA H100 80GB HBM3", faster)
    assert kept.rates_of("NVIDIA H100 80GB HBM3") == faster
    path.write_text("[]")
    kept.kept.cache_clear()
    with pytest.warns(FxQuantWarning, match="holds no rates of a card .*fxquant rates"):
        assert kept.rates_of("NVIDIA H100 80GB HBM3") == H100
    if not torch.cuda.is_available():
        assert main(["rates"]) == 1 and "no CUDA device" in capsys.readouterr().err
