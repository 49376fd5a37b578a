"""`Report.repro`: a script that runs one product of a report alone."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import torch

import fxquant
from fxquant.decisions import Attended, Decision, Matmul
from fxquant.errors import OptionError
from fxquant.files import write_whole
from fxquant.quantizers import Float8CurrentScalingQuantizer, Float8Quantizer, Quantizer
from fxquant.report.data import MODEL, ReportData, result, shape_text
from fxquant.roles import Gemm

_SCRIPT = Template('''\
"""The $gemm of $layer alone, as fxquant reported it under $recipe: $title.

Operands are random$measured. Those of a file of torch.save({$names}, path) take their place: python script.py path."""
import sys
import time

import torch
from torch import nn

import fxquant
$imports
DTYPE, DEVICE = $dtype, "cuda" if torch.cuda.is_available() else "cpu"
QUANTIZERS = {
$quantizers}

def random(*shape, rms=1.0, amax=None, strides=None):
    x = rms * torch.randn(shape)
    if amax is not None:
        x.view(-1)[0] = amax
    return x if strides is None else torch.empty_strided(shape, strides).copy_(x)

torch.manual_seed(0)
tensors = {
$tensors}
tensors |= torch.load(sys.argv[1], weights_only=True) if len(sys.argv) > 1 else {}
tensors = {name: x.to(DEVICE, DTYPE) for name, x in tensors.items()}

class Product(nn.Module):
$module
def timed(model):
    seconds, wait = [], torch.cuda.synchronize if DEVICE == "cuda" else lambda: None
    for _ in range(20 if DEVICE == "cuda" else 1):
        inputs = [tensors[name].detach().requires_grad_($grad) for name in $inputs]
$before        wait()
        start = time.perf_counter()
        $run
        wait()
        seconds.append(time.perf_counter() - start)
    return torch.cat([x.detach().float().flatten() for x in results]), 1e6 * sorted(seconds)[len(seconds) // 2]

model = Product()
recipe = fxquant.CustomRecipe(qfactory=lambda role: QUANTIZERS.get(role.tensor_type, fxquant.IdentityQuantizer()))
compiled = fxquant.compile(model, recipe, options={"inner": "aot_eager"} if DEVICE == "cpu" else None)
(exact, us), (found, quantized_us) = timed(model), timed(compiled)
print(fxquant.report(compiled).text(full=True))
print(f"$gemm: {(found - exact).norm() / exact.norm():.2%} from the unquantized result")
print(f"{us:.0f} us unquantized, {quantized_us:.0f} us quantized" if DEVICE == "cuda" else "no GPU: no times")
''')

_MODULE = """\
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(tensors["weight"], requires_grad={wgrad})
    def forward(self, x):
        return {product}
"""
_FUNCTION = """\
    def forward(self, {arguments}):
        return {product}
"""


@dataclass(frozen=True, kw_only=True)
class _Form:
    """The parts of the script that tell one kind of product from another."""

    module: str
    inputs: tuple[str, ...]
    wanted: str
    """The tensors whose gradients the backward is asked for."""
    gradient: str = "grad_output"


def repro(report: ReportData, layer: str, gemm: str = "fprop", *, path: str | Path | None = None) -> str:
    """A script that runs the ``fprop``, ``dgrad`` or ``wgrad`` of one product, named as in the report's tables.

    It has operands of the product's sizes, dtype and strides, with the spread that `fxquant.measure` has seen, and the
    product's own quantizers; it compares the result with the unquantized one and, on a GPU, times both. It is also
    written to `path`. Raises OptionError for a product that is not known, or not quantized.
    """
    wanted = Gemm(gemm) if gemm in tuple(Gemm) else None
    if wanted is None:
        raise OptionError(f"gemm={gemm!r}: it is one of {', '.join(Gemm)}")
    of_site = _decisions(report, layer)
    operands = [d for d in of_site if d.gemm == wanted]
    name = layer or MODEL
    if not operands:
        raise OptionError(f"{name} has no {gemm}: nothing asks for that gradient")
    if all(d.quantizer is None for d in operands):
        reasons = "; ".join(f"{d.role.tensor_type} {result(d)}" for d in operands)
        raise OptionError(f"the {gemm} of {name} is not quantized ({reasons}), and runs as torch runs it")
    facts = operands[0].attention or operands[0].matmul
    if facts is None:
        raise OptionError(f"the sizes of the {gemm} of {name} are not known: {operands[0].form or 'its operator'}")
    text = _script(report, of_site, operands, facts, name)
    if path is not None:
        write_whole(path, lambda file: file.write(text.encode()))
    return text


def _decisions(report: ReportData, layer: str) -> list[Decision]:
    """The decisions for the one product of a name; those of both products of an attention."""
    names = report.names()
    wanted = "" if layer == MODEL else layer
    by_layer = [d for d in report.decisions if d.layer == wanted]
    sites = {d.site for d in by_layer if d.attention is None}
    exact = [d for d in report.decisions if names[d.site] in (layer, wanted)]
    chosen = by_layer if len(sites) <= 1 and by_layer and (len(by_layer) > len(exact)) else exact
    if chosen and any(d.attention is not None for d in chosen):
        attention = next(d.attention for d in chosen if d.attention is not None)
        return [d for d in report.decisions if d.attention is not None and d.attention.site == attention.site]
    if chosen:
        site = chosen[0].site
        return [d for d in chosen if d.site == site]
    others = [names[site] or MODEL for site in dict.fromkeys(d.site for d in by_layer or report.decisions)]
    shown = ", ".join(list(dict.fromkeys(others))[:8]) + (" .." if len(set(others)) > 8 else "")
    raise OptionError(f"no product is called {layer!r}; those {'of this layer' if by_layer else 'here'} are {shown}")


def _script(
    report: ReportData, of_site: Sequence[Decision], operands: Sequence[Decision], facts: Matmul | Attended, name: str
) -> str:
    gemm = operands[0].gemm
    form = _attention(facts) if isinstance(facts, Attended) else _product(facts, operands[0].role.module_type, gemm)
    quantizers: dict[str, Quantizer] = {}
    for decision in of_site:
        if decision.quantizer is not None:
            quantizers.setdefault(decision.role.tensor_type, _stateless(decision.quantizer))
    texts = {role: _text(quantizer, name) for role, quantizer in quantizers.items()}
    tensors = _tensors(report, facts, of_site[0])
    backward = gemm is not Gemm.FPROP
    title = " x ".join(f"{d.role.tensor_type} {shape_text(d)} {d.direction}" for d in operands)
    asked = f"torch.autograd.grad(result, {form.wanted}, tensors[{form.gradient!r}])"
    return _SCRIPT.substitute(
        gemm=gemm, layer=name, recipe=report.recipe, title=title,
        measured=" with the spread that was measured" if any("rms=" in text for text in tensors.values()) else "",
        names=", ".join(f'"{name}": ..' for name in tensors),
        imports="".join(f"from {module} import {kind}\n" for module, kind in sorted(_imports(texts, quantizers))),
        dtype=facts.dtype,
        quantizers=",\n".join(f'    "{role}": {text}' for role, text in texts.items()),
        tensors=",\n".join(f'    "{name}": {text}' for name, text in tensors.items()),
        module=form.module, inputs=list(form.inputs), grad=backward and form.wanted != "[model.weight]",
        before="        result = model(*inputs)\n" if backward else "",
        run=f"results = {asked}" if backward else "results = [model(*inputs)]",
    )  # fmt: skip


def _product(facts: Matmul, module_type: str, gemm: Gemm) -> _Form:
    """A linear layer, experts or a product of two activations."""
    if module_type == "matmul":
        module = _FUNCTION.format(arguments="x, y", product="x @ y.mT")
        return _Form(
            module=module, inputs=("input", "other"), wanted="inputs[:1]" if gemm is Gemm.DGRAD else "inputs[1:]"
        )
    product = "nn.functional.linear(x, self.weight)"
    if facts.groups:
        ends = f"torch.arange(1, {facts.groups + 1}, dtype=torch.int32, device=DEVICE) * {facts.m // facts.groups}"
        product = f"torch._grouped_mm(x, self.weight.mT, offs={ends})"
    elif facts.batch_weights:
        product = "torch.bmm(x, self.weight.mT)"
    module = _MODULE.format(wgrad=gemm is Gemm.WGRAD, product=product)
    return _Form(module=module, inputs=("input",), wanted="inputs" if gemm is Gemm.DGRAD else "[model.weight]")


def _attention(facts: Attended) -> _Form:
    """An attention, without what its steps do besides scaling and a causal mask."""
    causal = any(step.kind == "causal" for step in facts.steps)
    options = f"is_causal={causal}, enable_gqa={facts.heads != facts.kv_heads}"
    product = f"nn.functional.scaled_dot_product_attention(q, k, v, {options})"
    module = _FUNCTION.format(arguments="q, k, v", product=product)
    return _Form(module=module, inputs=("q", "k", "v"), wanted="inputs")


def _tensors(report: ReportData, facts: Matmul | Attended, first: Decision) -> dict[str, str]:
    """The operands as calls of the script's `random`."""
    shapes: dict[str, tuple[int, ...]]
    strides: dict[str, tuple[int, ...]] = {}
    if isinstance(facts, Attended):
        shapes = {
            "q": (facts.batch, facts.heads, facts.queries, facts.width),
            "k": (facts.batch, facts.kv_heads, facts.keys, facts.width),
            "v": (facts.batch, facts.kv_heads, facts.keys, facts.features),
            "grad_output": (facts.batch, facts.heads, facts.queries, facts.features),
        }
    else:
        batch = (facts.batch,) if facts.batch > 1 or facts.batch_weights else ()
        weights = (facts.groups,) if facts.groups else batch
        m = facts.m // facts.groups * facts.groups if facts.groups else facts.m
        other = "other" if first.role.module_type == "matmul" else "weight"
        shapes = {
            "input": (*batch, m, facts.k),
            other: (*weights, facts.n, facts.k),
            "grad_output": (*batch, m, facts.n),
        }
        strides = {"input": facts.input_strides, other: facts.weight_strides}
    spread = {name: pair for loss in report.losses if loss.layer == first.layer for name, pair in loss.spread.items()}
    texts = {}
    for name, shape in shapes.items():
        options = [f"rms={shape[-1] ** -0.5:.3g}"] if name == "weight" and name not in spread else []
        options += [f"rms={spread[name][0]:.4g}, amax={spread[name][1]:.4g}"] if name in spread else []
        options += [f"strides={strides[name]}"] if strides.get(name) else []
        texts[name] = f"random({', '.join([*map(str, shape), *options])})"
    return texts


def _stateless(quantizer: Quantizer) -> Quantizer:
    """A quantizer without a slot of a model's state: its scale is then the tensor's own."""
    if isinstance(quantizer, Float8Quantizer):
        return Float8CurrentScalingQuantizer(fp8_dtype=quantizer.fp8_dtype)
    return quantizer


def _text(quantizer: Quantizer, layer: str) -> str:
    """A quantizer as Python. Raises OptionError for one that cannot be written."""
    text = repr(quantizer)
    scope: dict[str, Any] = {"torch": torch}
    try:
        imports = _imports({"": text}, {"": quantizer})
        scope |= {kind: getattr(importlib.import_module(module), kind) for module, kind in imports}
        same = eval(text, scope) == quantizer and "__main__" not in dict(imports)
    except Exception:
        same = False
    if not same:
        raise OptionError(
            f"the quantizer of {layer}, {text}, cannot be written into a script: import its class from a module, and "
            "let its repr be Python that makes an equal one, as that of a dataclass does"
        )
    return text


def _imports(texts: dict[str, str], quantizers: dict[str, Quantizer]) -> set[tuple[str, str]]:
    """The modules and names that the texts of quantizers need."""
    kinds = [kind for quantizer in quantizers.values() for kind in _kinds(quantizer)]
    modules = {kind.__name__: kind.__module__ for kind in kinds if "<locals>" not in kind.__qualname__}
    names = {
        node.id
        for text in texts.values()
        for node in ast.walk(ast.parse(text, mode="eval"))
        if isinstance(node, ast.Name) and node.id != "torch"
    }
    return {("fxquant" if hasattr(fxquant, name) else modules[name], name) for name in names}


def _kinds(value: object) -> Iterator[type]:
    """Yields the classes of a quantizer and of the quantizers that it consists of."""
    yield type(value)
    if isinstance(value, Quantizer):
        for part in vars(value).values():
            yield from _kinds(part)
