"""A tensor that several kernels read is written by one."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxquant.compat.private import force_stride_order, triton_kernel_wrapper_functional
from fxquant.passes.lower.lower import lower
from fxquant.passes.lower.materialize import materialize_shared_inputs
from fxquant.passes.settings import Settings

ops = torch.ops.fxquant
ROWWISE = "per_row_e4m3(pow2,torchao)"


def rewritten(run, *shapes: tuple[int, ...]) -> tuple[fx.Graph, int]:
    with FakeTensorMode(), enable_python_dispatcher():
        graph = make_fx(run)(*(torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)).graph
        lower(graph, Settings())
        count = materialize_shared_inputs(graph, Settings())
    graph.lint()
    return graph, count


def launches_of(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.target is triton_kernel_wrapper_functional]


def test_a_tensor_of_two_launches_is_written_once() -> None:
    def run(x: Tensor) -> list[Tensor]:
        return ops.hybrid_quantize(x.exp().view(64, 64), ROWWISE, ROWWISE)

    graph, count = rewritten(run, (2, 32, 64))
    written = graph.find_nodes(op="call_function", target=force_stride_order)
    assert count == len(written) == 1
    (view,) = written[0].users
    assert written[0].args[0].target is torch.ops.aten.exp.default and set(view.users) == set(launches_of(graph))
    assert len(launches_of(graph)) == 2  # its amaxes, and its casts


def test_whatever_else_reads_it_reads_what_is_written() -> None:
    """A residual stream: each sum would otherwise be that of everything before it."""
    spec = "block_1x128_e4m3(pow2)"

    def run(x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
        h = x + y
        return [h + z, h.sum(1), *ops.hybrid_quantize(h.view(128, 128), spec, spec)]

    graph, count = rewritten(run, *[(2, 64, 128)] * 3)
    (written,) = graph.find_nodes(op="call_function", target=force_stride_order)
    assert count == 1
    assert [user.target for user in written.args[0].users] == [force_stride_order]
    assert {user.target for user in written.users} >= {torch.ops.aten.add.Tensor, torch.ops.aten.sum.dim_IntList}


def test_what_a_graph_returns_or_a_gemm_reads_counts() -> None:
    spec = "block_1x128_e4m3(pow2)"

    def returned(x: Tensor) -> list[Tensor]:
        y = x.exp()
        return [y, *ops.hybrid_quantize(y, spec, spec)]

    def multiplied(x: Tensor) -> list[Tensor]:
        y = x.exp()
        return [y @ y, *ops.hybrid_quantize(y, spec, spec)]

    for run in (returned, multiplied):
        graph, count = rewritten(run, (128, 128))
        assert count == 1 and len(launches_of(graph)) == 1


def test_one_reader_and_what_is_in_memory_stay() -> None:
    spec = "block_1x128_e4m3(pow2)"
    for run in (
        lambda x: ops.hybrid_quantize(x.exp(), spec, spec),
        lambda x: ops.hybrid_quantize(x, ROWWISE, ROWWISE),
        lambda x: ops.hybrid_quantize(x @ x, ROWWISE, ROWWISE),
    ):
        graph, count = rewritten(run, (128, 128))
        assert count == 0 and launches_of(graph)
