"""The factory library, its composition, and factories written for TransformerEngine."""

from __future__ import annotations

import copy
import functools
import pickle
import re
from collections.abc import Callable

import pytest
import te_style_factories
import torch
from helpers import assert_same_bits, compiled, eager_backend, hybrid, linear_step, problem
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxquant
from fxquant import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizerRole,
    RecipeError,
    Rule,
    Rules,
    factories,
    recipes,
)
from fxquant.factories import (
    FACTORIES,
    PAPERS,
    by_module_type,
    by_name,
    by_tensor_type,
    first_and_last,
    from_string_roles,
)
from fxquant.recipes import ask, places
from fxquant.report.data import plain_spec

E5M2 = torch.float8_e5m2
LIBRARY = ("high_precision", "delayed_scaling", "current_scaling", "float8_block_scaling", "mxfp8", "nvfp4")
ZOO = (
    "high_precision_fwd_mxfp8_bwd",
    "mxfp8_fwd_high_precision_bwd",
    "mxfp8_fwd_nvfp4_bwd",
    "nvfp4_1d_weight",
    "nvfp4_row_scaled_fwd_mxfp8_bwd",
    "nvfp4_row_scaled_fwd_high_precision_bwd",
    "nvfp4_linear_fp8_dpa",
)
OPERANDS = ("input", "weight", "grad_output")
ROLES = [
    None,
    QuantizerRole(),
    *(QuantizerRole(kind, operand, "layers.0.fc") for kind in ("linear", "grouped_linear") for operand in OPERANDS),
    *(QuantizerRole("dpa", kind, "layers.0.attn") for kind in ("qkv", "s", "do", "dp", "o", "dqkv")),
    QuantizerRole(name="layers.0.attn.dpa_output"),
    QuantizerRole(name="layers.0.attn.dpa_grad_input"),
    QuantizerRole("something", "else"),
]


def role(tensor_type: str = "input", name: str = "layers.0.fc", module_type: str = "linear") -> QuantizerRole:
    return QuantizerRole(module_type, tensor_type, name)


def test_the_library_has_transformer_engines_names() -> None:
    for name in (*LIBRARY, *ZOO):
        assert callable(getattr(factories, name)), name
        assert name in factories.__all__
    assert factories.mxfp8_factory is factories.mxfp8 is factories.mxfp8_quantizer_factory
    with pytest.raises(AttributeError, match="no attribute 'mxfp9_factory'"):
        _ = factories.mxfp9_factory


def test_every_factory_is_listed() -> None:
    assert list(FACTORIES) == [*LIBRARY, *ZOO]


@pytest.mark.parametrize("name", FACTORIES)
def test_every_role_is_answered(name: str) -> None:
    """Invariant 9: unknown, empty and absent roles are answered as an input is, and attention as the others."""
    factory = FACTORIES[name]
    for asked in ROLES:
        assert isinstance(factory(asked), (fxquant.Quantizer, DelayedScalingRequest)), asked
        assert factory(asked) == factory(asked), "equal answers to equal roles"
        for same in (pickle.loads(pickle.dumps(factory(asked))), copy.deepcopy(factory(asked))):
            assert same == factory(asked) and hash(same) == hash(factory(asked))
    assert factory(role(module_type="matmul")) == IdentityQuantizer(), "as under the recipes"
    assert factory(None) == factory(QuantizerRole())
    assert pickle.loads(pickle.dumps(factory)) is factory


BUILT_IN = {
    "high_precision": "high_precision",
    "delayed_scaling": "delayed_scaling",
    "current_scaling": "current_scaling",
    "float8_block_scaling": "float8_blockwise",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_factory_of_a_recipe_gives_its_bits(name: str) -> None:
    """Invariants 1 and 2: output, dgrad, wgrad and bias gradient."""
    recipe, custom = recipes.get(BUILT_IN[name]), CustomRecipe(qfactory=FACTORIES[name])
    for operand in OPERANDS:
        for kind in ("linear", "grouped_linear"):
            assert custom.quantizer(role(operand, module_type=kind)) == recipe.quantizer(
                role(operand, module_type=kind)
            )
    x, w, dy = problem()
    bias = torch.randn(160, dtype=x.dtype)
    torch.manual_seed(0)
    first = linear_step(custom, x, w, dy, bias)
    torch.manual_seed(0)
    assert_same_bits(first, linear_step(recipe, x, w, dy, bias))


NV, DEQUANTIZED = NVFP4Quantizer(), "rowwise_dequantized"


def rht(**settings: bool) -> NVFP4Quantizer:
    return NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, **settings)


def expected(name: str) -> dict[str, fxquant.Quantizer]:
    """The quantizers of a linear's operands (te-semantics 1.1)."""
    mx, identity = MXFP8Quantizer(), IdentityQuantizer()
    return {
        "high_precision_fwd_mxfp8_bwd": lambda: (hybrid(identity, mx), hybrid(identity, mx), mx),
        "mxfp8_fwd_high_precision_bwd": lambda: (
            hybrid(mx, identity, DEQUANTIZED),
            hybrid(mx, identity, DEQUANTIZED),
            identity,
        ),
        "mxfp8_fwd_nvfp4_bwd": lambda: (hybrid(mx, rht()), hybrid(mx, NV, DEQUANTIZED), rht(stochastic_rounding=True)),
        "nvfp4_1d_weight": lambda: (
            rht(),
            hybrid(NV, NV.copy(), DEQUANTIZED),
            rht(stochastic_rounding=True),
        ),
        "nvfp4_row_scaled_fwd_mxfp8_bwd": lambda: (mx, mx, mx),
        "nvfp4_row_scaled_fwd_high_precision_bwd": lambda: (
            hybrid(NVFP4Quantizer(row_scaled_nvfp4=True), identity, DEQUANTIZED),
            hybrid(NV, identity, DEQUANTIZED),
            identity,
        ),
        "nvfp4_linear_fp8_dpa": lambda: (
            rht(),
            NVFP4Quantizer(with_2d_quantization=True),
            rht(stochastic_rounding=True),
        ),
    }[name]()


@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_gives_a_linear_these_quantizers(name: str) -> None:
    assert tuple(FACTORIES[name](role(operand)) for operand in OPERANDS) == expected(name)


@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_trains(name: str) -> None:
    """Every pair of the zoo multiplies; the gradients are near those in high precision."""
    x, w, dy = problem()
    got, high = (linear_step(recipe, x, w, dy) for recipe in (CustomRecipe(qfactory=FACTORIES[name]), None))
    for key, value in high.items():
        assert (got[key] - value).norm() / value.norm() < 0.3, key


@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_answers_for_experts_as_for_linears(name: str) -> None:
    if name != "nvfp4_row_scaled_fwd_mxfp8_bwd":
        assert all(FACTORIES[name](role(o, module_type="grouped_linear")) == FACTORIES[name](role(o)) for o in OPERANDS)


def test_row_scaled_experts_as_in_composer_2() -> None:
    mx = MXFP8Quantizer()
    made = [factories.nvfp4_row_scaled_fwd_mxfp8_bwd(role(o, module_type="grouped_linear")) for o in OPERANDS]
    assert made == [
        hybrid(NVFP4Quantizer(row_scaled_nvfp4=True), mx, DEQUANTIZED),
        hybrid(NVFP4Quantizer(), mx, DEQUANTIZED),
        mx,
    ]


def test_fp8_attention_beside_nvfp4_linears() -> None:
    made = {kind: factories.nvfp4_linear_fp8_dpa(role(kind, module_type="dpa")) for kind in ("qkv", "s", "do", "dp")}
    request = DelayedScalingRequest(amax_history_len=1, amax_compute_algo="most_recent")
    assert made == {
        "qkv": Float8CurrentScalingQuantizer(),
        "s": request,
        "do": Float8CurrentScalingQuantizer(E5M2),
        "dp": request,
    }
    for suffix, dtype in (("dpa_output", torch.float8_e4m3fn), ("dpa_grad_input", E5M2)):
        hint = factories.nvfp4_linear_fp8_dpa(QuantizerRole(name=f"core_attention.{suffix}"))
        assert hint == Float8CurrentScalingQuantizer(dtype)


def test_mxfp8_then_high_precision_is_the_dequantized_override() -> None:
    """Invariant 33."""
    x, w, dy = problem()
    override = MXFP8BlockScaling(backward_override="dequantized")
    custom = CustomRecipe(qfactory=factories.mxfp8_fwd_high_precision_bwd)
    assert_same_bits(linear_step(custom, x, w, dy), linear_step(override, x, w, dy))
    on_top = CustomRecipe(qfactory=factories.mxfp8, backward_override="dequantized")
    assert_same_bits(linear_step(on_top, x, w, dy), linear_step(override, x, w, dy))


def test_composition_by_type() -> None:
    by_module = by_module_type(
        {"linear": factories.mxfp8, "grouped_linear": NVFP4Quantizer(), "dpa": "current_scaling"}
    )
    assert by_module(role()) == MXFP8Quantizer()
    assert by_module(role(module_type="grouped_linear")) == NVFP4Quantizer()
    assert by_module(role(module_type="matmul")) == by_module(role("qkv", module_type="dpa")) == IdentityQuantizer()
    by_tensor = by_tensor_type({"grad_output": MXFP8Quantizer(E5M2)}, default="mxfp8")
    assert [by_tensor(role(o)) for o in OPERANDS] == [MXFP8Quantizer(), MXFP8Quantizer(), MXFP8Quantizer(E5M2)]


def test_composition_by_name_nests_and_names_what_matched_nothing() -> None:
    inner = by_tensor_type({"weight": Float8BlockQuantizer()}, default=Float8BlockQuantizer(block_scaling_dim=1))
    rules = by_name({r"lm_head|.*\.router": "high_precision", r".*\.up": inner, r"lyers\..*": "mxfp8"}, "mxfp8")
    assert rules(role(name="lm_head")).is_identity and rules(role(name="layers.3.router")).is_identity
    assert rules(role("weight", "layers.0.up")) == Float8BlockQuantizer()
    assert rules(role("input", "layers.0.up")) == Float8BlockQuantizer(block_scaling_dim=1)
    assert rules(role(name="layers.0.down")) == MXFP8Quantizer()
    seen = [role("input", "layers.0.up"), role("input", "layers.0.down")]
    assert CustomRecipe(qfactory=rules).unused(seen) == [
        r"rule 0: name='lm_head|.*\\.router'",
        "rule 1 > rule 0: tensor_type='weight'",
        r"rule 2: name='lyers\\..*'",
    ]


class Stacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        def stack(n: int) -> nn.ModuleList:
            return nn.ModuleList(nn.ModuleDict({"fc": nn.Linear(32, 32), "norm": nn.LayerNorm(32)}) for _ in range(n))

        self.encoder, self.decoder, self.head = stack(3), stack(5), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.encoder, *self.decoder):
            x = block["norm"](block["fc"](x))
        return self.head(x)


def kept(factory: Rules, names: list[str]) -> list[str]:
    return [name for name in names if factory(role(name=name)).is_identity]


def test_first_and_last_layers_by_their_number() -> None:
    names = [f"model.layers.{i}.mlp.experts.{e}.up" for i in range(12) for e in (0, 11)] + ["lm_head", "0.fc", "11"]
    ends = first_and_last("mxfp8", first=1, last=2, layers=12)
    expected = [name for name in names if name.split("layers.")[-1].split(".")[0] in ("0", "10", "11")]
    assert kept(ends, names) == expected
    assert ends(role(name="layers.5.fc")) == ends(role(name="lm_head")) == MXFP8Quantizer()
    only_first = first_and_last(factories.mxfp8, first=2)
    assert kept(only_first, ["h.0.a", "h.1.a", "h.2.a", "h.10.a", "v2.h.0"]) == ["h.0.a", "h.1.a", "v2.h.0"]
    everything = first_and_last("mxfp8", first=3, last=3, layers=4)
    assert kept(everything, names[:8]) == names[:8] and len(everything.rules) == 4
    assert len(first_and_last("mxfp8", last=1, layers=4).rules) == 1
    assert first_and_last("mxfp8", first=1, ends=MXFP8Quantizer(E5M2))(role(name="h.0")) == MXFP8Quantizer(E5M2)


WORDS = st.sampled_from(["layers", "h", "v2", "3d", "mlp", "up", "experts", "0", "1", "2", "7", "11", "-1"])


@settings(deadline=None)
@given(st.lists(WORDS, max_size=6), st.integers(0, 3), st.integers(0, 3), st.integers(1, 12))
def test_the_index_of_a_layer_is_the_first_number_of_its_name(
    parts: list[str], first: int, last: int, layers: int
) -> None:
    index = next((int(part) for part in parts if part.isdigit()), None)
    inside = index is not None and index < layers and (index < first or index >= layers - last)
    assert bool(kept(first_and_last("mxfp8", first=first, last=last, layers=layers), [".".join(parts)])) == inside


def test_first_and_last_layers_of_each_stack_of_a_model() -> None:
    model = Stacks()
    recipe = CustomRecipe(qfactory=first_and_last("mxfp8", first=1, last=1, layers=model))
    report = fxquant.explain(model, recipe, torch.randn(16, 32))
    high = {d.role.name for d in report.decisions if d.quantizer is None}
    assert high == {"encoder.0.fc", "encoder.2.fc", "decoder.0.fc", "decoder.4.fc"}
    assert report.unused == []
    wrong = CustomRecipe(qfactory=first_and_last("mxfp8", last=1, layers=9))
    assert len(fxquant.explain(model, wrong, torch.randn(16, 32)).unused) == 1


def test_no_rule_that_the_package_wrote_goes_unused() -> None:
    stack = [nn.LayerNorm(64), *(module for _ in range(14) for module in (nn.Linear(64, 64), nn.GELU()))]
    model = nn.ModuleDict({"words": nn.ModuleList([nn.Embedding(8, 64)]), "h": nn.ModuleList(stack)})
    roles = [role(name=f"h.{i}") for i in range(1, 28, 2)]
    ends, last = first_and_last("mxfp8", first=1, last=1, layers=model), factories.nvfp4_last_layers(model)
    assert kept(ends, [r.name for r in roles]) == ["h.1", "h.27"], "members without weights are no layers"
    assert kept(last, [r.name for r in roles]) == ["h.25", "h.27"], "15% of 14"
    assert ends.unused(roles) == last.unused(roles) == [], "experts that are not there, a stack without matmuls"


def test_first_and_last_need_to_know_the_number() -> None:
    with pytest.raises(RecipeError, match="last=2 needs the number of layers"):
        first_and_last("mxfp8", last=2)
    with pytest.raises(RecipeError, match="cannot be negative"):
        first_and_last("mxfp8", first=-1)
    with pytest.raises(RecipeError, match="number of layers of a stack, not 0"):
        first_and_last("mxfp8", last=1, layers=0)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.router = nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.router(self.down(nn.functional.gelu(self.up(x))))


TE_FORMATS = {
    "keeps_sensitive_layers": {"up": "mxfp8_e4m3", "router": None},
    "per_tensor": {"up": "per_tensor_e4m3(pow2,eps=1e-06)", "router": "per_tensor_e4m3(pow2,eps=1e-06)"},
    "one_format_per_gemm": {"up": "mxfp8_e4m3", "router": "mxfp8_e4m3"},
    "delayed_attention_output": {"up": "per_tensor_e4m3", "down": "per_tensor_e4m3(slot=0)"},
}


@pytest.mark.parametrize("name", TE_FORMATS)
def test_transformer_engines_factories_work_after_a_change_of_imports(name: str) -> None:
    recipe = te_style_factories.RECIPES[name]
    torch.manual_seed(0)
    model, x = Mlp(), torch.randn(32, 64)
    backend = eager_backend(recipe)
    y = torch.compile(model, backend=backend, fullgraph=True)(x)
    y.sum().backward()
    assert 0 < (y - model(x)).norm() / model(x).norm() < 0.1
    inputs = {
        d.role.name: d.quantizer and str(d.quantizer.spec(d.direction))
        for d in backend.report().decisions
        if (d.role.tensor_type, d.gemm) == ("input", "fprop")
    }
    assert {layer: inputs[layer] for layer in TE_FORMATS[name]} == TE_FORMATS[name]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert pickle.loads(pickle.dumps(recipe)) == recipe


def test_attention_roles_are_for_factories_that_ask_for_them() -> None:
    s = role("s", module_type="dpa")
    qfactory = te_style_factories.delayed_attention_output
    assert CustomRecipe(qfactory=qfactory, fp8_dpa=False).quantizer(s) == IdentityQuantizer()
    for asked in (None, True):
        assert isinstance(CustomRecipe(qfactory=qfactory, fp8_dpa=asked).quantizer(s), DelayedScalingRequest)


def test_every_keyword_of_nvfp4_is_taken() -> None:
    for operand in OPERANDS:
        assert te_style_factories.nvfp4_in_full(role(operand)) == factories.nvfp4(role(operand))
    experts = te_style_factories.nvfp4_in_full(role("input", "layers.0.experts"))
    assert experts == NVFP4Quantizer(row_scaled_nvfp4=True)


@pytest.mark.parametrize(
    "kind",
    [Float8CurrentScalingQuantizer, Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer, IdentityQuantizer],
)
def test_shared_keywords_mean_something_or_are_refused(kind: type[fxquant.Quantizer]) -> None:
    """Invariant 64: no process group, and directions that do not make quantizers differ."""
    x = torch.randn(32, 32)
    rows = kind(rowwise=True, columnwise=False)
    assert rows == kind() and rows(x).columnwise is None and rows(x).rowwise is not None
    assert kind(rowwise=False)(x).rowwise is None
    assert kind()(x).columnwise is not None
    assert kind(with_amax_reduction=False, amax_reduction_group=None) == kind()
    assert kind(with_amax_reduction=True).operand_spec() == kind().operand_spec(), "the only rank"
    with pytest.raises(fxquant.errors.SettingError, match="amax_reduction_group is a process group, not 'tp'"):
        kind(with_amax_reduction=True, amax_reduction_group="tp")
    with pytest.raises(TypeError, match="unexpected keyword"):
        kind(with_magic=True)


def test_a_copy_is_equal_and_another_object() -> None:
    """Invariant 37: with the directions that it was made for, which equality does not see."""
    quantizer = MXFP8Quantizer(fp8_dtype=E5M2, columnwise=False)
    twin = quantizer.copy()
    assert twin == quantizer and twin is not quantizer and not twin.columnwise
    assert HybridQuantizer(rowwise_quantizer=quantizer, columnwise_quantizer=twin)


def test_string_roles_are_translated() -> None:
    asked: list[str] = []

    def factory(text: str) -> fxquant.Quantizer:
        asked.append(text)
        return te_style_factories.older_roles(text)

    x, w, dy = problem()
    custom = CustomRecipe(qfactory=from_string_roles(factory))
    assert_same_bits(linear_step(custom, x, w, dy), linear_step("current_scaling", x, w, dy))
    assert asked == ["linear_input", "linear_weight", "linear_grad_output"]
    adapter = from_string_roles(te_style_factories.older_roles)
    assert adapter(role("grad_output", module_type="grouped_linear")) == Float8CurrentScalingQuantizer(E5M2)
    assert adapter(role("qkv", module_type="dpa")) == adapter(role(module_type="matmul")) == IdentityQuantizer()
    assert pickle.loads(pickle.dumps(CustomRecipe(qfactory=adapter))) == CustomRecipe(qfactory=adapter)
    assert repr(adapter) == "StringRoles(factory=te_style_factories.older_roles)"


def part_missing(asked: QuantizerRole) -> fxquant.Quantizer:
    return HybridQuantizer(rowwise_quantizer=MXFP8Quantizer(), columnwise_quantizer=None)


def nothing(asked: object) -> None:
    return None


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (nothing, "qfactory returned None"),
        (functools.partial(nothing), "qfactory returned None"),
        (Rules([Rule(nothing, tensor_type="input")], "mxfp8"), r"rule 0 \(tensor_type='input'\) returned None"),
        (Rules(default=nothing), "the default of Rules returned None"),
        (by_name({".*": by_module_type({"linear": nothing})}), r"rule 0 \(module_type='linear'\) returned None"),
        (first_and_last(nothing, first=1), "the default of Rules returned None"),
        (part_missing, "columnwise_quantizer must be a Quantizer, not NoneType: IdentityQuantizer"),
        (Rules(default=part_missing), "columnwise_quantizer must be a Quantizer, not NoneType: IdentityQuantizer"),
        (lambda asked: MXFP8Quantizer, "qfactory returned a type"),
    ],
)
def test_none_is_refused_on_every_path_with_the_role_named(factory: object, message: str) -> None:
    """Invariant 11: at compile time, before anything runs."""
    ran: list[int] = []
    layer = nn.Linear(32, 32)
    layer.register_forward_pre_hook(lambda *_: ran.append(1))
    model = nn.ModuleDict({"5": layer})["5"]
    with pytest.raises(Exception, match=message) as error:
        compiled(model, CustomRecipe(qfactory=factory))(torch.randn(16, 32))
    assert "(linear, input)" in str(error.value)
    assert CustomRecipe(qfactory=factory).qfactory is factory


def test_rules_refuse_what_cannot_answer_when_they_are_made() -> None:
    with pytest.raises(RecipeError, match=r"the rule for name='head' must have .*NoneType: IdentityQuantizer"):
        Rule(None, name="head")
    with pytest.raises(RecipeError, match="the default of Rules must have"):
        Rules(default=3)
    with pytest.raises(RecipeError, match="did you mean 'mxfp8'"):
        by_name({"head": "mxpf8"})
    with pytest.raises(RecipeError, match=r"name='\(' of a rule is not a regular expression"):
        by_name({"(": "mxfp8"})


def test_composed_factories_compare_copy_and_pickle_by_value() -> None:
    def make() -> CustomRecipe:
        ends = first_and_last(factories.mxfp8, first=1, last=1, layers=8)
        return CustomRecipe(qfactory=by_name({"head": ends, "x": DelayedScalingRequest(margin=1)}, default="nvfp4"))

    for same in (make(), copy.copy(make()), copy.deepcopy(make()), pickle.loads(pickle.dumps(make()))):
        assert same == make() and hash(same) == hash(make()) and same.fingerprint() == make().fingerprint()
    assert repr(make()) == str(make()) and " at 0x" not in repr(make())


def test_custom_delayed_scaling_equals_the_recipe_step_by_step() -> None:
    """Invariants 1 and 18."""
    runs = []
    for recipe in (DelayedScaling(), CustomRecipe(qfactory=factories.delayed_scaling)):
        torch.manual_seed(0)
        torch.compiler.reset()
        model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))
        backend, optimizer = eager_backend(recipe), torch.optim.SGD(model.parameters(), 0.1)
        run, steps = torch.compile(model, backend=backend), []
        for step in range(4):
            y = run(torch.randn(16, 64) * 2.0**step)
            y.square().mean().backward()
            grads = {name: p.grad.clone() for name, p in model.named_parameters()}
            steps.append({"y": y.detach(), **grads, **backend.state_dict()})
            optimizer.step()
            optimizer.zero_grad()
        runs.append(steps)
    for a, b in zip(*runs, strict=True):
        assert_same_bits(a, b)


def inputs_alone(role: str) -> fxquant.Quantizer | None:
    return MXFP8Quantizer() if role == "linear_input" else None


def test_none_for_a_string_role_keeps_that_operand_in_high_precision() -> None:
    layer, x = nn.Linear(32, 48), torch.randn(16, 32)
    y = compiled(layer, CustomRecipe(qfactory=from_string_roles(inputs_alone)))(x)
    seen = MXFP8Quantizer().quantize(x).dequantize()
    torch.testing.assert_close(y, nn.functional.linear(seen, layer.weight, layer.bias))


@pytest.mark.parametrize(
    "factory",
    [
        inputs_alone,
        lambda asked: MXFP8Quantizer() if asked in ("linear_input", "linear_weight") else NVFP4Quantizer(),
        lambda asked: MXFP8Quantizer() if asked.startswith("linear") else None,
        lambda asked: {"linear_input": MXFP8Quantizer()}[asked],
        {"linear_input": MXFP8Quantizer()}.get,
        lambda asked: MXFP8Quantizer() if "input" in asked else None,
        lambda asked: MXFP8Quantizer() if asked[:6] == "linear" else None,
        lambda asked: MXFP8Quantizer() if re.match("linear_.*", asked) else None,
    ],
)
def test_a_factory_for_string_roles_without_the_adapter_is_told_of_it(
    factory: Callable[..., fxquant.Quantizer],
) -> None:
    with pytest.raises(RecipeError, match=r"layers.0 \(linear, input\).*factories\.from_string_roles"):
        CustomRecipe(qfactory=factory).quantizer(QuantizerRole("linear", "input", "layers.0"))
    assert QuantizerRole("linear", "input") != "head" and QuantizerRole("linear") == QuantizerRole("linear")


@pytest.mark.parametrize("name", PAPERS)
def test_recipes_of_papers_train_a_linear_layer(name: str) -> None:
    """By the formats that their sources have, and each with its source in its docstring."""
    factory = PAPERS[name]
    assert any(source in str(factory.__doc__) for source in ("arXiv", "OCP MX v1.0"))
    specs = {
        operand: plain_spec(str(ask(factory, role(operand)).operand_spec()))  # type: ignore[union-attr]
        for operand in OPERANDS
    }
    assert (
        list(specs.values())
        == {
            "fp8_e5m2_gradients": ["per_tensor_e4m3", "per_tensor_e4m3", "per_tensor_e5m2"],
            "deepseek_v3": ["block_1x128_e4m3>block_1x128_e4m3", "block_128x128_e4m3", "block_1x128_e4m3"],
            "mxfp8_everywhere": ["mxfp8_e4m3"] * 3,
            "mxfp4_weights": ["e3m2_1x32_e8m0", "e2m1_1x32_e8m0", "e3m2_1x32_e8m0"],
            "mxfp6": ["e2m3_1x32_e8m0", "e2m3_1x32_e8m0", "e3m2_1x32_e8m0"],
            "mxint8": ["int8_1x32_e8m0"] * 3,
        }[name]
    )
    layer, x = nn.Linear(64, 96), torch.randn(32, 64)
    backend = eager_backend(CustomRecipe(qfactory=factory))
    y = torch.compile(layer, backend=backend)(x)
    y.square().mean().backward()
    assert backend.report().coverage == 1.0 and 0 < (y - layer(x)).norm() / y.norm() < 0.2
    assert places.runs_as(CustomRecipe(qfactory=factory), (9, 0)) == ("emulated" if "mx" in name else "native")


def test_ends_of_papers_stay_in_high_precision() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(32, 32) for _ in range(20))})

    def kept(rules: Rules, kind: str = "linear") -> list[int]:
        return [i for i in range(20) if ask(rules, role("weight", f"blocks.{i}", kind)) == IdentityQuantizer()]

    assert kept(factories.nvfp4_last_layers(model)) == [17, 18, 19] == kept(factories.nvfp4_last_layers(20))
    assert kept(factories.nvfp4_last_layers(20, first=2, last=1)) == [0, 1, 19]
    assert kept(factories.nvfp4_last_layers(20), "dpa") == list(range(20))
    assert kept(factories.first_and_last_layer("mxfp8", model)) == [0, 19]
    deepseek = factories.deepseek_v3
    kept_by_name = [name for name in ("lm_head", "layers.3.mlp.router", "layers.3.mlp.gate", "router.up")
                    if deepseek(role("input", name)).is_identity]  # fmt: skip
    assert kept_by_name == ["lm_head", "layers.3.mlp.router"], "a gate may be SwiGLU's"
    with pytest.raises(AttributeError, match="did you mean 'mxint8'"):
        _ = factories.mxint9
