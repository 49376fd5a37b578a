"""Products of DTensors become products of local parts, whatever they are spelled like; others say why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from expecttest import assert_expected_inline
from helpers import captured, listing
from rewritten import rewrite
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fxquant import SkipReason
from fxquant.passes.insert.localize import localize


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def spread(mesh: DeviceMesh, placement: Any, *shape: int) -> DTensor:
    local = torch.randn(shape, requires_grad=True)
    return DTensor.from_local(local, mesh, [placement], run_check=False).detach().requires_grad_()


def test_before_and_after(mesh: DeviceMesh) -> None:
    args = spread(mesh, Replicate(), 2, 32, 64), spread(mesh, Shard(0), 48, 64), spread(mesh, Shard(0), 48)
    (gm,) = captured(F.linear, *args)
    assert localize([gm]) == 1
    assert_expected_inline(listing(gm.graph), """\
%0 = input [2, 32, 64]
%1 = input [48, 64]
%2 = input [48]
%3 = local_part(%0, R, P)
%4 = local_part(%1, S0, S0)
%5 = local_part(%2, S0, S0)
%6 = linear(%3, %4, %5)
%7 = spread_out(%6, %0, S2, [2, 32, 48])
return [%7]""")  # fmt: skip
    assert localize([gm]) == 0


SPELLINGS: dict[str, tuple[Callable[..., Tensor], Any, Any]] = {
    "columns": (F.linear, Replicate(), Shard(0)),
    "rows": (F.linear, Shard(2), Shard(1)),
    "text": (F.linear, Shard(1), Replicate()),
    "whole": (F.linear, Replicate(), Replicate()),
    "text gathered for columns": (F.linear, Shard(1), Shard(0)),
    "addends": (F.linear, Partial(), Replicate()),
    "@": (lambda x, w: x @ w.mT, Replicate(), Shard(0)),
    "method": (lambda x, w: x.matmul(w.T), Shard(2), Shard(1)),
    "mm": (lambda x, w: torch.mm(x[0], w.t()), Replicate(), Shard(0)),
    "addmm": (lambda x, w: torch.addmm(w[:, 0], x[0], w.t()), Replicate(), Shard(0)),
    "alpha": (lambda x, w: torch.addmm(x[1] @ w.mT, x[0], w.mT, alpha=2, beta=3), Replicate(), Shard(0)),
    "einsum": (lambda x, w: torch.einsum("bsk,nk->bns", x, w), Shard(2), Shard(1)),
    "bmm": (lambda x, w: torch.bmm(x, w.expand(2, 48, 64).mT), Shard(0), Replicate()),
    "tensordot": (lambda x, w: torch.tensordot(x, w, ([2], [1])), Replicate(), Shard(0)),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name: str, mesh: DeviceMesh) -> None:
    run, left, right = SPELLINGS[name]
    x, w = spread(mesh, left, 2, 32, 64), spread(mesh, right, 48, 64)
    try:
        want = run(x, w)
    except RuntimeError as error:
        pytest.skip(f"torch cannot place it: {error}")
    facts = rewrite("mxfp8", run, x, nn.Parameter(w))
    assert {d.skip_reason for d in facts.decisions if d.role.module_type == "linear"} == {None}
    got = facts.gm(*_inputs(facts.gm, x, w))[0]
    assert isinstance(got, DTensor) and got.shape == want.shape and got.stride() == want.stride()
    assert (got - want).to_local().norm() < 0.1 * want.to_local().norm()


def _inputs(gm: torch.fx.GraphModule, x: Tensor, w: Tensor) -> list[Any]:
    """The inputs of a graph in its order, which is that of their first use."""
    shapes = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    return [x if getattr(v, "ndim", 0) == 3 else w if isinstance(v, Tensor) else x.device_mesh for v in shapes]


def test_what_stays_says_why(mesh: DeviceMesh) -> None:
    def run(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return torch.einsum("mk,nk,nj->mj", x[0], w, w), w @ w

    args = spread(mesh, Replicate(), 2, 32, 64), nn.Parameter(spread(mesh, Replicate(), 64, 64))
    facts = rewrite("mxfp8", run, *args)
    skipped = {d.detail for d in facts.decisions if d.skip_reason is SkipReason.PLACEMENT}
    assert skipped == {"einsum is not one product of two tensors", "both operands are l_w_"}
