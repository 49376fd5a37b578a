"""A report of a graph that torch takes from its cache has what passes found out when it was compiled."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import fxquant
from fxquant import Report
from fxquant.backend.kept_facts import Facts, _read, _write
from fxquant.decisions import ComputedOnce, Considered, KeptInFp8, NotFused, Saved, SentQuantized
from fxquant.report.html import FROM_CACHE, section
from fxquant.roles import Gemm


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(x)))


def step(seed: int = 0, **options: Any) -> Report:
    """The report of a training step of a new model, compiled as a new process would."""
    torch.compiler.reset()
    torch.manual_seed(seed)
    backend = fxquant.Backend("current_scaling", **options)
    torch.compile(Mlp().bfloat16(), backend=backend)(torch.randn(64, 128).bfloat16()).sum().backward()
    return backend.report()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("without_cpp")
def test_a_cached_graph_has_its_pictures_bytes_and_reasons(folder: Path) -> None:
    first, again = step(), step(seed=1)
    assert first.views and "captured" not in first.graphs
    assert counters["aot_autograd"]["autograd_cache_hit"] >= 1
    assert (again.graphs, again.views, again.saved) == (first.graphs, first.views, first.saved)
    assert again.not_fused == first.not_fused and again.picture("down", "backward") == first.picture("down", "backward")
    (kept,) = folder.glob("fxquant/*/*.json.gz")
    kept.write_bytes(b"damaged")
    lost = step()
    assert lost.from_cache and not lost.views and FROM_CACHE in section(lost)
    assert not first.from_cache and FROM_CACHE not in section(first)


@pytest.mark.usefixtures("without_cpp")
def test_nothing_is_kept_where_torch_keeps_nothing(folder: Path) -> None:
    assert step(inductor={"force_disable_caches": True}).views and step(inner="aot_eager").views
    assert not [*folder.glob("fxquant/*")]


def test_files_that_cannot_be_read_or_written_are_as_none(tmp_path: Path) -> None:
    sent = SentQuantized(layers=("a", "b"), operand="input", spec="mxfp8_e4m3", bits=8.25, instead=16, dequantized=True)
    left = NotFused(step="lower", layer="a", operator="amax", reason="why", graph="forward")
    once = ComputedOnce(place=1, gemm=Gemm.DGRAD)
    considered = [left, sent, Saved(total=3, quantized=1, instead=2), KeptInFp8("a", "silu", 1, 2), once]
    assert set(map(type, considered)) == set(get_args(Considered))
    path, facts = tmp_path / "facts.json.gz", Facts(texts={"forward": ["a graph"]}, considered=considered)
    _write(path, facts)
    whole = path.read_bytes()
    assert _read(path) == facts
    for damaged in (b"", b"damaged", whole[:-6], whole[:12] + b"\xff\xff" + whole[14:], gzip.compress(b"[1, 2]")):
        path.write_bytes(damaged)
        assert _read(path) is None, damaged
    _write(path / "below a file" / "facts.json.gz", facts)
    folder = tmp_path / "a folder.json.gz"
    folder.mkdir()
    _write(folder, facts)
    assert _read(folder) is None
