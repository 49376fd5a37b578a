"""Products that are quantized become one operator each; all others keep their nodes."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from helpers import captured, hybrid, listing, per_role
from rewritten import rewritten
from torch import fx, nn

from fxquant import IdentityQuantizer, MXFP8Quantizer, Rule, Rules, recipes
from fxquant.formats import LinearSpec
from fxquant.passes.graph.values import value_of

LINEAR = torch.ops.fxquant.linear.default


def inserted(gm: fx.GraphModule) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=LINEAR)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 48)
        self.down = nn.Linear(48, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def test_before_and_after() -> None:
    x = torch.randn(8, 32)
    assert_expected_inline(listing(captured(Model(), x)[0].graph), """\
%0 = input [48, 32]
%1 = input [48]
%2 = input [8, 32]
%3 = input [32, 48]
%4 = linear(%2, %0, %1)
%5 = relu(%4)
%6 = linear(%5, %3, None)
return [%6]""")  # fmt: skip
    assert_expected_inline(listing(rewritten("mxfp8", Model(), x).graph), """\
%0 = input [48, 32]
%1 = input [48]
%2 = input [8, 32]
%3 = input [32, 48]
%4 = linear(%2, %0, %1, input=mxfp8_e4m3 weight=mxfp8_e4m3 grad_output=mxfp8_e4m3 name=up)
%5 = relu(%4)
%6 = linear(%5, %3, None, input=mxfp8_e4m3 weight=mxfp8_e4m3 grad_output=mxfp8_e4m3 name=down)
return [%6]""")  # fmt: skip


def test_a_linear_keeps_its_tensors_and_gets_the_spec_of_its_layer() -> None:
    gm = rewritten("mxfp8", Model(), torch.randn(2, 8, 32))
    up, down = inserted(gm)
    assert (value_of(up.args[0]).shape, value_of(up.args[1]).shape) == ((2, 8, 32), (48, 32))
    assert value_of(up.args[2]).shape == (48,) and down.args[2] is None
    assert up.args[3] == "input=mxfp8_e4m3 weight=mxfp8_e4m3 grad_output=mxfp8_e4m3 name=up"
    assert not [n for n in gm.graph.nodes if "nn.linear" in str(n.target)]


def test_new_nodes_carry_what_later_passes_ask_for() -> None:
    for node in inserted(rewritten("mxfp8", Model(), torch.randn(8, 32))):
        name = LinearSpec.parse(node.args[3]).name
        assert node.meta["custom"]["fxquant"] == name
        assert node.meta["nn_module_stack"] and node.meta["stack_trace"]
        assert value_of(node).shape == (8, {"up": 48, "down": 32}[name])


def test_high_precision_leaves_the_graph_alone() -> None:
    model, x = Model(), torch.randn(8, 32)
    (before,) = captured(model, x)
    text = before.print_readable(print_output=False)
    assert rewritten("high_precision", model, x).print_readable(print_output=False) == text


def test_layers_that_a_rule_leaves_out_keep_their_node() -> None:
    rules = Rules([Rule(IdentityQuantizer(), name="down")], default="mxfp8")
    gm = rewritten(recipes.CustomRecipe(qfactory=rules), Model(), torch.randn(8, 32))
    assert [LinearSpec.parse(n.args[3]).name for n in inserted(gm)] == ["up"]
    assert len([n for n in gm.graph.nodes if "linear" in str(n.target)]) == 2


def test_the_rewritten_graph_computes_the_same_shapes_and_nearly_the_same_values() -> None:
    model, x = Model(), torch.randn(2, 8, 32)
    gm = rewritten("mxfp8", model, x)
    named = {f"{layer}_parameters_{kind}": p for k, p in model.named_parameters() for layer, kind in [k.split(".")]}
    inputs = [next((v for k, v in named.items() if k in n.name), x) for n in gm.graph.find_nodes(op="placeholder")]
    output = gm(*inputs)[0]
    assert (output - model(x)).norm() / model(x).norm() < 0.1


def test_no_gradient_needs_no_quantizer_for_it() -> None:
    with torch.no_grad():
        (node, _) = inserted(rewritten("mxfp8", Model(), torch.randn(8, 32)))
    assert "grad_output=identity" in node.args[3]


def test_both_directions_and_their_source_reach_the_spec() -> None:
    mx, identity = MXFP8Quantizer(), IdentityQuantizer()
    recipe = per_role(
        input=hybrid(mx, identity),
        weight=hybrid(mx, identity, "rowwise_dequantized"),
        grad_output=identity,
    )
    spec = LinearSpec.parse(inserted(rewritten(recipe, Model(), torch.randn(8, 32)))[0].args[3])
    assert (str(spec.input), str(spec.weight)) == ("mxfp8_e4m3|identity", "mxfp8_e4m3>identity")


def test_the_autocast_dtype_in_force_reaches_the_spec() -> None:
    def inside(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = model.up(x)
            with torch.autocast("cpu", enabled=False):
                return model.down(y.float())

    model, x = Model(), torch.randn(8, 32)
    nodes = inserted(rewritten("mxfp8", lambda x: inside(model, x), x))
    assert [LinearSpec.parse(n.args[3]).autocast for n in nodes] == ["bfloat16", ""]
    nodes = inserted(rewritten("mxfp8", model, x, autocast={"cpu": torch.bfloat16}))
    assert [LinearSpec.parse(n.args[3]).autocast for n in nodes] == ["bfloat16", "bfloat16"]


def test_bodies_of_higher_order_ops_are_rewritten() -> None:
    from torch.utils.checkpoint import checkpoint

    model = Model()
    gm = rewritten("mxfp8", lambda x: checkpoint(model, x, use_reentrant=False), torch.randn(8, 32))
    bodies = [m for m in gm.modules() if isinstance(m, fx.GraphModule) and m is not gm]
    assert not inserted(gm) and [len(inserted(body)) for body in bodies] == [2]
