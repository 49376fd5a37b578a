from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch
from bits import same
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxquant.compat.private import DENSE, triton_kernel_wrapper_functional
from fxquant.formats import FORMATS, AttentionSpec, QuantSpec, Step
from fxquant.passes.graph.considered import not_fused
from fxquant.passes.lower.lower import lower
from fxquant.passes.pipeline import Lowering
from fxquant.passes.settings import Settings

ops = torch.ops.fxquant
SPECS = [name for name in FORMATS if name != "identity"]


def traced(run, *args: Tensor, mode: str = "fake") -> fx.GraphModule:
    return make_fx(run, tracing_mode=mode)(*args)


def assert_same(a: list[Tensor], b: list[Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        assert same(x, y)


def semantic(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if getattr(n.target, "namespace", "") == "fxquant"]


@pytest.mark.parametrize("shape", [(64, 96), (33, 50)], ids=str)
@pytest.mark.parametrize("spec", [*SPECS, "nvfp4(rht)", "per_row_e4m3(pow2,torchao)", "mxfp8_e4m3(mode=even)"])
def test_lowered_quantization_has_the_same_bytes_and_no_semantic_operator(spec: str, shape: tuple[int, int]) -> None:
    def run(x: Tensor) -> list[Tensor]:
        return [*ops.hybrid_quantize(x, spec, spec), *ops.quantize(x, spec, "rowwise")]

    x = torch.randn(shape).bfloat16()
    gm = traced(run, x)
    assert lower(gm.graph, Settings()) == 2 and not semantic(gm)
    gm.recompile()
    assert_same(gm(x), run(x))


@pytest.mark.parametrize("spec", [s for s in SPECS if "e5m2" not in s and s != "block_128x128_e4m3"])
def test_lowered_gemm_has_the_same_bits(spec: str) -> None:
    def run(a: Tensor, b: Tensor, bias: Tensor) -> list[Tensor]:
        left, right = ops.quantize(a, spec, "rowwise"), ops.quantize(b, spec, "columnwise")
        back = ops.dequantize(right, spec, "columnwise", [48, 40], torch.float32)
        return [ops.scaled_mm(left, right, spec, spec, bias, torch.bfloat16, False), back]

    inputs = torch.randn(64, 48), torch.randn(48, 40), torch.randn(40)
    gm = traced(run, *inputs)
    lower(gm.graph, Settings())
    gm.recompile()
    assert not semantic(gm)
    assert_same(gm(*inputs), run(*inputs))


@pytest.mark.parametrize("spec", ["mxfp8_e4m3", "nvfp4_2d", "block_128x128_e4m3"])
def test_symbolic_sizes_stay_symbolic(spec: str) -> None:
    def run(x: Tensor) -> list[Tensor]:
        return ops.quantize(x, spec, "columnwise")

    gm = traced(run, torch.randn(64, 96), mode="symbolic")
    with enable_python_dispatcher():  # as in Inductor
        lower(gm.graph, Settings())
    gm.recompile()
    for shape in ((64, 96), (33, 50), (5, 17)):
        x = torch.randn(shape)
        assert_same(gm(x), run(x))


def test_nodes_keep_where_they_come_from() -> None:
    gm = traced(lambda x: ops.quantize(x, "mxfp8_e4m3", "rowwise"), torch.randn(32, 32))
    for node in semantic(gm):
        node.meta["custom"] = {"fxquant": "layers.0.fc"}
    lower(gm.graph, Settings())
    made = [n for n in gm.graph.nodes if n.op == "call_function"]
    assert made and all("val" in n.meta and n.meta["custom"] == {"fxquant": "layers.0.fc"} for n in made)


def test_no_memory_of_lowered_operators_is_padded() -> None:
    """Inductor reads a key of `node.meta`, which it calls by a name of its own."""
    gm = traced(lambda x: ops.quantize(x, "nvfp4", "columnwise"), torch.randn(64, 96))
    lower(gm.graph, Settings())
    called = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert called and all(node.meta[DENSE] for node in called)
    assert f'"{DENSE}"' in inspect.getsource(importlib.import_module("torch._inductor.ir"))


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_equal_operators_are_traced_once_and_inlined_each(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("fxquant.passes.lower.lower")  # the package's attribute is the function
    count = 0
    trace = module._trace

    def counted(*args):
        nonlocal count
        count += 1
        return trace(*args)

    monkeypatch.setattr(module, "_trace", counted)

    def run(x: Tensor, y: Tensor) -> list[Tensor]:
        parts = [ops.quantize(each, "nvfp4", "rowwise") for each in (x, y, y.T, x + y)]
        return [part for each in parts for part in each]

    gm = traced(run, torch.randn(32, 48), torch.randn(32, 48), mode=mode)
    with enable_python_dispatcher():
        assert lower(gm.graph, Settings()) == 4 and count == 3  # of an input, of its transpose, of what is made of them
    gm.recompile()
    for shape in ((32, 48), (7, 33)) if mode == "symbolic" else ((32, 48),):
        x, y = torch.randn(shape), torch.randn(shape)
        assert_same(gm(x, y), run(x, y))


def test_two_scales_stay_two_though_they_share_a_fake_value() -> None:
    """And calls that differ in which of their arguments are one tensor have traces of their own."""

    def run(x: Tensor, one: Tensor, two: Tensor) -> list[Tensor]:
        return [
            *ops.hybrid_quantize(x, "per_tensor_e4m3", "per_tensor_e4m3", one, one),
            *ops.hybrid_quantize(x, "per_tensor_e4m3", "per_tensor_e4m3", one, two),
        ]

    inputs = torch.randn(32, 32), torch.tensor([2.0]), torch.tensor([3.0])
    gm = traced(run, *inputs)
    want = gm(*inputs)
    _, one, two = gm.graph.find_nodes(op="placeholder")
    two.meta["val"] = one.meta["val"]
    assert lower(gm.graph, Settings()) == 2
    gm.recompile()
    assert all(same(a, b) for a, b in zip(want, gm(*inputs), strict=True))


def test_a_pass_of_the_users_still_runs_and_counts_in_the_key() -> None:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Mine(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            seen.append(len(graph.nodes))

        def uuid(self) -> str:
            return "mine"

    seen: list[int] = []
    gm = traced(lambda x: ops.quantize(x, "mxfp8_e4m3", "rowwise"), torch.randn(32, 32))
    lowering = Lowering(Settings(), Mine())
    lowering(gm.graph)
    assert len(seen) == 1
    assert lowering.uuid() != Lowering(Settings()).uuid()
    assert Lowering(Settings(), seen.append).uuid() is None, "a pass without an identity cannot be cached"


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_lowered_attention_has_the_same_bits_and_keeps_sizes_symbolic(mode: str) -> None:
    head = QuantSpec(format="per_head_e4m3")
    steps = (Step("mul", 0.25), Step("add", extra=0), Step("causal"))
    spec = str(AttentionSpec(qkv=head, s=head, do=head, dp=head, steps=steps, dropout=0.2))

    def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor, bias: Tensor, seed: Tensor) -> list[Tensor]:
        made = [ops.quantize_heads(x, str(head), g, t) for x, g, t in ((q, 2, False), (k, 1, False), (v, 1, True))]
        o, lse, _ = ops.attention_forward(*made, [bias], seed, None, spec, 16, q.dtype)
        return [o, *ops.attention_backward(do, *made, o, lse, [bias], seed, None, None, None, [0], spec, 16)]

    def inputs(queries: int, keys: int) -> list[Tensor]:
        shapes = (2, 4, queries, 16), (2, 2, keys, 16), (2, 2, keys, 24), (2, 4, queries, 24), (1, 4, queries, keys)
        return [*(torch.randn(shape) for shape in shapes), torch.tensor([7])]

    gm = traced(run, *inputs(40, 50), mode=mode)
    with enable_python_dispatcher():
        assert lower(gm.graph, Settings()) == 5 and not semantic(gm)
    gm.recompile()
    for given in [inputs(40, 50)] + [inputs(33, 20)] * (mode == "symbolic"):
        for got, expected in zip(gm(*given), run(*given), strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("rows", "launches"), [(32, 1), (0, 0)])
def test_amaxes_of_what_lies_in_memory_are_a_kernel(rows: int, launches: int) -> None:
    with FakeTensorMode():
        x = torch.empty(rows, 64, device="cuda", dtype=torch.bfloat16)
        gm = make_fx(lambda x: [ops.amax(x), ops.amax(x.exp())])(x)
    lower(gm.graph, Settings())
    assert [n.target for n in gm.graph.nodes].count(triton_kernel_wrapper_functional) == launches
    assert {left.step for left in not_fused(gm.graph)} == {"lower"}


def test_no_kernel_is_translated_to_learn_what_its_launches_write(monkeypatch) -> None:
    wrap = importlib.import_module("torch._higher_order_ops.triton_kernel_wrap")
    translated: list[Any] = []
    monkeypatch.setattr(wrap, "generate_ttir", lambda *args: translated.append(args) or (None, []))
    spec = str(QuantSpec(format="per_tensor_e4m3"))
    with FakeTensorMode():
        x = torch.empty(64, 64, device="cuda", dtype=torch.bfloat16)
        graph = make_fx(lambda x: [ops.amax(x), *torch.ops.fxquant.hybrid_quantize(x, spec, spec)])(x).graph
    lower(graph, Settings())
    launches = graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional)
    assert len(launches) == 3
    for launch in launches:
        values = fx.node.map_arg(launch.kwargs["kwargs"], lambda n: n.meta["val"])
        names = [launch.kwargs[name] for name in ("kernel_idx", "constant_args_idx")]
        written = wrap.get_mutated_tensors(*names, values, launch.kwargs["tma_descriptor_metadata"])
        assert sorted(written) == sorted(launch.kwargs["tensors_to_clone"])
    assert not translated
