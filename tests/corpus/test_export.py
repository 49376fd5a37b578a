"""Every model of the corpus that torch exports, as a quantized program: two batch sizes, and the compiled path's bytes.

`make sweep` has whole models; what always runs has one layer of each kind. The payloads that reach the GEMMs are
recorded in both paths and have to be the same, weights and activations.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers import NAMES, Eager
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_leaves

from fxquant import quantize_program, report_of
from fxquant.kernels.cast import reference

models = pytest.importorskip("models", reason="needs the corpus extra: transformers and peft")

QUICK = ("llama_gqa", "flex_plain")
"""The models that run under every recipe."""

ALWAYS = ("current_scaling", "mxfp8")
"""The recipes that the first always runs under."""

SLOW = ("bert",)
"""Others that always run; the rest is for `make sweep`."""

SINKS = "kitchen_sink", "ragged_kitchen_sink"
"""Static: their inputs are split into as many groups as there are experts."""


def marks(name: str, recipe: str) -> list[pytest.MarkDecorator]:
    """Whether a case always runs."""
    if name in QUICK:
        always = name != QUICK[0] or recipe in ALWAYS
    else:
        always = name in SLOW and recipe == "mxfp8"
    return ([pytest.mark.slow] if name in SLOW else []) if always else [pytest.mark.sweep]


CASES = [
    pytest.param(name, recipe, pytest.mark.sweep in applied, id=f"{name}-{recipe}", marks=applied)
    for name in models.CASES
    for recipe in (NAMES if name in QUICK else ("mxfp8",))
    for applied in [marks(name, recipe)]
]


Payloads = list[tuple[str, str]]


def digest(parts: Sequence[Tensor]) -> str:
    return hashlib.sha256(b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in parts)).hexdigest()


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Payloads]:
    """The digests of both operands of every GEMM that is run inside."""
    found: Payloads = []
    multiply: Callable[..., Tensor] = reference.scaled_mm

    def record(a: Sequence[Tensor], a_spec: Any, b: Sequence[Tensor], *rest: Any) -> Tensor:
        if type(a[0]) is Tensor:
            found.append((digest(a), digest(b)))
        return multiply(a, a_spec, b, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(reference, "scaled_mm", record)
        yield found


def export(model: nn.Module, kwargs: Mapping[str, Any], dynamic: bool) -> ExportedProgram:
    shapes: Any = {name: {0: Dim.AUTO} for name in kwargs}
    return torch.export.export(model, (), dict(kwargs), dynamic_shapes=shapes if dynamic else None)


class Named(nn.Module):
    """A model that takes `**kwargs`, with arguments that dynamic shapes can be given by name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return self.model(input_ids=input_ids, labels=labels)


def larger(kwargs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same inputs with one more row."""
    return {name: torch.cat((value, value[:1])) for name, value in kwargs.items()}


def floats(output: Any) -> list[Tensor]:
    leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


@pytest.mark.parametrize(("name", "recipe", "whole"), CASES)
@pytest.mark.filterwarnings("ignore")
def test_model_exports_quantized(name: str, recipe: str, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if "kitchen_sink" in name and not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")
    model, kwargs = models.CASES[name]()
    model = model if whole else models.one_layer(model)
    model = Named(model) if "args" in inspect.signature(model.forward).parameters else model
    model.eval()
    kwargs = {key: value.detach() for key, value in kwargs.items()}
    source = export(model, kwargs, dynamic=name not in SINKS)
    program = quantize_program(source, recipe)
    program.validate()
    report = report_of(program)
    assert report.explained >= 0.99 and report.coverage > 0
    module, run = program.module(), torch.compile(model, backend=Eager(recipe), dynamic=True)
    for batch in (kwargs,) if name in SINKS else (kwargs, larger(kwargs)):
        with torch.no_grad(), recorded(monkeypatch) as exported:
            got = floats(module(**batch))
        with recorded(monkeypatch) as wanted:  # with gradients, as the model was exported
            want = floats(run(**batch))
        assert len(got) == len(want) and exported
        # of equal products a program holds one
        assert {b for _, b in exported} == {b for _, b in wanted}, "the same weights"
        assert set(exported) == set(wanted), "the same activations"
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w.detach())
    unread = {name for name, node in inputs(program).items() if not node.users}
    assert unread <= {name for name, node in inputs(source).items() if not node.users}, "nothing is kept for nothing"


def inputs(program: ExportedProgram) -> dict[str, torch.fx.Node]:
    """The placeholders of what a program holds, by name in its state."""
    names = {**program.graph_signature.inputs_to_parameters, **program.graph_signature.inputs_to_buffers}
    return {names[n.name]: n for n in program.graph.find_nodes(op="placeholder") if n.name in names}
