"""Inductor takes the values of nodes that passes wrote for right where they are, and for wrong where they are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import fx, nn
from torch._inductor.fx_utils import FakeTensorUpdater
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode

from fxquant.compat import torch_version
from fxquant.compat.fakes import LAUNCHES, VALUES
from fxquant.compat.private import (
    inductor_config,
    make_fx,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)
from fxquant.compat.values import storage_key
from fxquant.passes.graph.builder import Builder
from fxquant.passes.pipeline import Lowering
from fxquant.passes.settings import Settings

aten = torch.ops.aten


def layers(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = x.relu().view(8, 2).t() + 1
        x = x.t().reshape(4, 4)
    return x


class Counting(FakeTensorMode):
    ran = 0

    def dispatch(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        self.ran += 1
        return super().dispatch(func, *args, **kwargs)


def updated(change: bool, symbolic: bool = False) -> tuple[fx.GraphModule, int]:
    """Each relu becomes a sigmoid, and Inductor's updater sees it; also returns how many operators ran for that."""
    mode = Counting()
    with mode:
        x = torch.empty(4, 4)
    gm = make_fx(layers, tracing_mode="symbolic")(torch.ones(4, 4)) if symbolic else make_fx(layers)(x)
    updater: Any = FakeTensorUpdater(gm.graph if torch_version() < (2, 13) else gm)  # type: ignore[arg-type]
    for node in gm.graph.find_nodes(op="call_function", target=aten.relu.default):
        other = Builder(node).call(aten.sigmoid.default, node.args[0])
        node.replace_all_uses_with(other)
        gm.graph.erase_node(node)
    (value, *_) = (node.meta["val"] for node in gm.graph.nodes if "val" in node.meta)
    mode.ran = 0
    update = VALUES.changed(type(updater).incremental_update)
    settings = {"post_grad_custom_post_pass": Lowering(Settings())} if change else {}
    with V.set_fake_mode(value.fake_mode), inductor_config.patch(settings):
        update(updater)
    return gm, mode.ran


def facts(gm: fx.GraphModule) -> list[Any]:
    """Returns the values of nodes, and which nodes are in the memory of which."""
    places: dict[int, int] = {}
    values = [node.meta["val"] for node in gm.graph.nodes if "val" in node.meta]
    return [(v.shape, v.stride(), v.dtype, places.setdefault(storage_key(v), len(places))) for v in values]


def test_values_of_new_nodes_stay_and_their_views_follow_them() -> None:
    (ours, few), (torchs, many) = updated(True), updated(False)
    assert facts(ours) == facts(torchs)
    for node in ours.graph.find_nodes(op="call_function", target=aten.view.default):
        assert storage_key(node.meta["val"]) == storage_key(node.all_input_nodes[0].meta["val"])
    assert 0 < few < many / 2, "equal layers are asked for once"


def test_symbolic_sizes_are_left_to_torch() -> None:
    assert [str(fact) for fact in facts(updated(True, symbolic=True)[0])] == [
        str(fact) for fact in facts(updated(False, symbolic=True)[0])
    ]


def test_a_wrong_value_is_put_right() -> None:
    with FakeTensorMode():
        x = torch.empty(4, 4)
        gm = make_fx(lambda x: x.relu() + 1)(x)
        (relu,) = gm.graph.find_nodes(op="call_function", target=aten.relu.default)
        updater: Any = FakeTensorUpdater(gm.graph if torch_version() < (2, 13) else gm)  # type: ignore[arg-type]
        other = Builder(relu).call(aten.t.default, relu.args[0])
        other.meta["val"] = torch.empty(3)
        relu.args = (other,)
    with V.set_fake_mode(x.fake_mode), inductor_config.patch(post_grad_custom_post_pass=Lowering(Settings())):  # type: ignore[attr-defined]
        VALUES.changed(type(updater).incremental_update)(updater)
    assert [node.meta["val"].stride() for node in (other, relu)] == [(1, 4), (1, 4)]


def test_a_launch_that_clones_nothing_is_written_without_a_trace() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    for node in (x, y):
        node.meta["val"] = SimpleNamespace(name=node.name)
    what = {"kernel_idx": 0, "constant_args_idx": 0, "grid": [(1, 1, 1)], "tma_descriptor_metadata": {}}
    for cloned in ([], ["out"], []):
        call = {**what, "kwargs": {"x": x, "out": y}, "tensors_to_clone": cloned}
        graph.call_function(triton_kernel_wrapper_functional, (), call)
    graph.output(x)
    fx.GraphModule(nn.Module(), graph)
    left: list[Any] = []
    with inductor_config.patch(post_grad_custom_post_pass=Lowering(Settings())):
        LAUNCHES.changed(lambda graph: left.extend(node.target for node in graph.nodes))(graph)
    assert left[2:5] == [
        triton_kernel_wrapper_mutation,
        triton_kernel_wrapper_functional,
        triton_kernel_wrapper_mutation,
    ]
    first = next(node for node in graph.nodes if node.target is triton_kernel_wrapper_mutation)
    assert first.kwargs == {**what, "kwargs": {"x": x, "out": y}}
    assert first.meta["eager_input_vals"][1]["kwargs"] == {"x": x.meta["val"], "out": y.meta["val"]}
