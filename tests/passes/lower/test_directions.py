from __future__ import annotations

import torch
from bits import same
from expecttest import assert_expected_inline
from helpers import story
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxquant.passes.lower.directions import pair_directions
from fxquant.passes.settings import Settings

quantize = torch.ops.fxquant.quantize
MX, NV = "mxfp8_e4m3", "nvfp4"


def merged(run, *args: Tensor) -> tuple[fx.GraphModule, int]:
    """A traced function after the pass, which has not changed its results."""
    gm = make_fx(run, tracing_mode="fake")(*args)
    before = gm(*args)
    went = pair_directions(gm.graph, Settings())
    gm.recompile()
    for a, b in zip(before, gm(*args), strict=True):
        assert same(a, b)
    return gm, went


def ops(gm: fx.GraphModule) -> list[str]:
    return [n.target._opname for n in gm.graph.nodes if getattr(n.target, "namespace", "") == "fxquant"]


def test_both_directions_of_a_tensor_become_one_node() -> None:
    gm, _ = merged(lambda x: [*quantize(x, MX, "rowwise"), *quantize(x, NV, "columnwise")], torch.randn(32, 64))
    assert_expected_inline(story(gm), """\
  #0 = hybrid_quantize([32, 64], mxfp8_e4m3, nvfp4)
  saves #0, #0.column""")  # fmt: skip


def test_equal_quantizations_become_one() -> None:
    gm, went = merged(lambda x: [t for _ in range(3) for t in quantize(x, MX, "rowwise")], torch.randn(32, 64))
    assert ops(gm) == ["quantize"] and went == 2 * 3


def test_shared_inputs_are_read_once_for_all_users_and_directions() -> None:
    def run(x: Tensor) -> list[Tensor]:
        return [t for _ in range(3) for d in ("columnwise", "rowwise") for t in quantize(x, MX, d)]

    gm, _ = merged(run, torch.randn(32, 64))
    assert ops(gm) == ["hybrid_quantize"]


def test_two_formats_of_one_direction_stay_apart() -> None:
    def run(x: Tensor) -> list[Tensor]:
        return [*quantize(x, MX, "rowwise"), *quantize(x, NV, "rowwise"), *quantize(x, NV, "columnwise")]

    gm, _ = merged(run, torch.randn(32, 64))
    assert sorted(ops(gm)) == ["hybrid_quantize", "quantize"]


def test_different_tensors_stay_apart() -> None:
    def run(x: Tensor, y: Tensor) -> list[Tensor]:
        return [*quantize(x, MX, "rowwise"), *quantize(y, MX, "columnwise")]

    gm, went = merged(run, torch.randn(32, 64), torch.randn(32, 64))
    assert ops(gm) == ["quantize", "quantize"] and went == 0


def test_the_merged_node_stands_before_its_first_user() -> None:
    def run(x: Tensor) -> list[Tensor]:
        column = quantize(x, MX, "columnwise")
        early = column[0].view(torch.uint8) + 1
        return [early, *quantize(x, MX, "rowwise"), column[1]]

    gm, _ = merged(run, torch.randn(32, 64))
    assert ops(gm) == ["hybrid_quantize"]


def test_a_graph_without_quantization_is_left_alone() -> None:
    gm, went = merged(lambda x: [x + 1], torch.randn(4))
    assert went == 0 and ops(gm) == []


def test_merging_twice_is_merging_once() -> None:
    gm, _ = merged(lambda x: [*quantize(x, MX, "rowwise"), *quantize(x, MX, "columnwise")], torch.randn(32, 64))
    assert pair_directions(gm.graph, Settings()) == 0
