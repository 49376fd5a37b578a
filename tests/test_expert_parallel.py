"""Experts on several ranks: what tokens take on their way there quantized, and that products get the same bytes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import hybrid
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd, wait_tensor

import fxquant
from fxquant import CustomRecipe, IdentityQuantizer, MXFP8Quantizer, QuantizerRole
from fxquant.report.text import sent_text

WIDTH, HIDDEN, EXPERTS, CHOSEN, TOKENS = 64, 96, 4, 2, 40


class Experts(nn.Module):
    """Gated experts, whose tokens come one group after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 8) for _ in range(2))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 8)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        ends = sizes.cumsum(0, dtype=torch.int32)
        gate, up = (torch._grouped_mm(x, weight, offs=ends) for weight in (self.gate, self.up))
        return torch._grouped_mm(F.silu(gate) * up, self.down, offs=ends)


class Mixture(nn.Module):
    """Tokens choose experts, of which each rank of a group has some, or one process all."""

    def __init__(self, tail: bool = False) -> None:
        super().__init__()
        self.tail = tail
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()
        self.ranks = 1

    def spread(self) -> None:
        """Keeps the experts of this rank."""
        self.ranks = dist.get_world_size()
        for name, weight in [*self.experts.named_parameters()]:
            part = weight.detach().chunk(self.ranks)[dist.get_rank()]
            setattr(self.experts, name, nn.Parameter(part.clone()))

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.router(x).float().softmax(-1).topk(CHOSEN)
        order = chosen.flatten().argsort(stable=True)
        token = order // CHOSEN
        sizes = (chosen.flatten().unsqueeze(1) == torch.arange(EXPERTS)).sum(0)
        y = self.travel(x[token], sizes) if self.ranks > 1 else self.experts(x[token], sizes)
        weighted = y.float() * scores.flatten()[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, token, weighted.to(x.dtype))

    def travel(self, x: Tensor, sizes: Tensor) -> Tensor:
        """Sends tokens to their experts' ranks, which sort them by expert, and results back."""
        group = dist.group.WORLD
        with torch.no_grad():
            arriving = wait_tensor(all_to_all_single(sizes, None, None, group)).view(self.ranks, -1)
            out, into = sizes.view(self.ranks, -1).sum(1).tolist(), arriving.sum(1).tolist()
        rows = all_to_all_single_autograd(x, into, out, group)
        expert = torch.arange(EXPERTS // self.ranks).repeat(self.ranks)
        expert = expert.repeat_interleave(arriving.flatten(), output_size=rows.shape[0])
        places = expert.argsort(stable=True)
        if self.tail:  # an index out of range takes a row of zeros
            zero = rows.new_zeros((1, rows.shape[-1]))
            y = self.experts(torch.cat((rows, zero))[places], arriving.sum(0))
        else:
            y = self.experts(rows[places, :], arriving.sum(0))
        back = torch.empty_like(y).index_put((places,), y)
        return all_to_all_single_autograd(back, out, into, group)


def no_columns(role: QuantizerRole) -> Any:
    """MXFP8 whose weight gradients read tokens in high precision."""
    return hybrid(MXFP8Quantizer(), IdentityQuantizer()) if role.tensor_type == "input" else MXFP8Quantizer()


RECIPES: dict[str, Any] = {"columns in bfloat16": CustomRecipe(no_columns)}


def step(recipe: str, travels: bool, train: bool, tail: bool = False, spread: bool = True) -> Any:
    """Results of a step, bytes an element in each exchange of rows by the half of the step, and the report."""
    torch.manual_seed(0)
    torch.compiler.reset()
    torch._dynamo.config.capture_scalar_outputs = True
    model = Mixture(tail)
    if spread:
        model.spread()
    model = model.to(torch.bfloat16).requires_grad_(train)
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()
    x.requires_grad_(train)
    options = {"inner": "aot_eager", "quantized_dispatch": travels}
    run = fxquant.compile(model, RECIPES.get(recipe, recipe), options=options, fullgraph=True)
    results = {"y": run(x)}
    if train:
        results["y"].float().square().mean().backward()
        results.update({"x": x.grad, **{name: p.grad for name, p in model.named_parameters()}})
    report = run.report()
    sizes = {"u8": 1, "bf16": 2, "f32": 4}
    sent = {}
    for half, text in report.graphs.items():
        exchanged = re.findall(r"all_to_all_single\w*: \"(\w+)\[[^\]]*, (\d+)\]\"", text)
        sent[half] = sum(sizes[dtype] * int(width) for dtype, width in exchanged) / WIDTH
    return {name: value.detach() for name, value in results.items()}, sent, report


def compared(recipe: str, train: bool, tail: bool) -> Any:
    """How far results are from those of tokens that travel as they are, what is sent, and what the report says."""
    results, sent, report = step(recipe, True, train, tail)
    plain, sent_plain, _ = step(recipe, False, train, tail)
    far = {name: (results[name] - plain[name]).norm().item() / plain[name].norm().item() for name in plain}
    alone = 0.0 if train else (step(recipe, False, train, spread=False)[0]["y"] - results["y"]).abs().max().item()
    return far, alone, sent, sent_plain, [sent_text(sent) for sent in report.sent_quantized], str(report)


ALL = {"y", "x", "router.weight", "experts.gate", "experts.up", "experts.down"}
BITS = {"mxfp8": ("mxfp8_e4m3", 8.25), "rowwise": ("per_row_e4m3(pow2,torchao)", 8.5)}


@pytest.mark.parametrize(("recipe", "tail"), [("mxfp8", False), ("rowwise", True)])
def test_a_step_sends_tokens_and_gradients_quantized(recipe: str, tail: bool, ranks: Ranks) -> None:
    spec, bits = BITS[recipe]
    for far, _, sent, sent_plain, told, report in ranks.run(compared, recipe, True, tail):
        assert far.keys() == ALL and not any(far[name] for name in ("y", "x", "router.weight")), far
        assert max(far.values()) < 1e-2, "columns of what is rounded to rows"
        assert sent == {"forward": bits / 8 + 2, "backward": bits / 8 + 2}, "results, and their gradients, stay"
        assert sent_plain == {"forward": 4, "backward": 4}
        kinds = [
            f"{kind} of experts as {spec}, {bits:g} bits an element in place of 16" for kind in ("input", "grad_output")
        ]
        assert told == [f"{kind}; its columns are quantized from what arrives" for kind in kinds]
        assert f"sent quantized: {kinds[0]}" in report


def test_inference_has_the_bits_of_all_experts_in_one_process(ranks: Ranks) -> None:
    for far, alone, sent, _, told, _ in ranks.run(compared, "mxfp8", False, False):
        assert far == {"y": 0} and alone == 0
        assert sent == {"forward": 8.25 / 8 + 2}
        assert told == ["input of experts as mxfp8_e4m3, 8.25 bits an element in place of 16"]


def told(recipe: str) -> Any:
    _, sent, report = step(recipe, True, True)
    return sent, [f"{reason.reason}" for reason in report.not_fused if reason.step == "dispatch_payloads"]


@pytest.mark.parametrize(
    ("recipe", "half", "reason"),
    [
        ("columns in bfloat16", 8.25 / 8 + 2, "reads what is exchanged besides"),
        ("current_scaling", 4, "per_tensor_e4m3 has a scale for several rows, which come from all ranks"),
    ],
)
def test_what_travels_as_it_is_has_a_reason(recipe: str, half: float, reason: str, ranks: Ranks) -> None:
    for sent, reasons in ranks.run(told, recipe):
        assert sent == {"forward": 4, "backward": half}
        assert reasons and reasons[0].endswith(reason), reasons
