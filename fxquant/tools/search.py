"""`fxquant.search`: a format for each operand of a model, under a budget."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxquant.backend.options import check_model
from fxquant.backend.probing import Session
from fxquant.checks import checked, did_you_mean
from fxquant.compat.private import tree_leaves
from fxquant.errors import ArgumentError, OptionError, RecipeError
from fxquant.recipes import AutoRecipe, CustomRecipe, HighPrecision, Recipe, resolve
from fxquant.recipes.operands import Operand
from fxquant.tools.emulation import ROLES, Emulation, Switchable
from fxquant.tools.measured import Measured, key_of
from fxquant.tools.patterns import recipe_of
from fxquant.tools.progress import progress
from fxquant.tools.result import Effect, Point, SearchResult, pareto
from fxquant.tools.sensitivity import Sensitivity, request_of
from fxquant.tools.space import KINDS, Chosen, Space, Step
from fxquant.tools.training import Training, adamw, loss_of
from fxquant.tools.trials import Trials, batches_of, kept_state

log = logging.getLogger(__name__)
_FLOOR = 2e-4
"""A change of the loss below this share of it is taken for noise."""


_ALONE = 3
"""The operands that are measured alone."""


@checked(
    ArgumentError,
    called="fxquant.search",
    takes={
        "model": "a module",
        "data": "a batch (a tensor, a tuple of arguments or a dict of keywords), or a list of them",
        "candidates": 'a list of recipes or their names, such as ["nvfp4", "mxfp8"]',
        "budget": "a dict with one of bits, memory, time and loss, such as {'bits': 6.0}",
        "steps": "a number of training steps; 0 searches for inference",
        "time_limit": "seconds",
        "file": "a path",
    },
)
def search(
    model: Any,
    data: Any,
    loss: Callable[..., Any] | None = None,
    candidates: Any = ("nvfp4", "mxfp8"),
    budget: Any = None,
    seed: int = 0,
    **settings: Any,
) -> SearchResult:
    """Chooses a candidate, or high precision, for every operand in every direction, and returns a recipe for it.

    `loss` is a function of (output, target) for batches (input, target), of the output alone, or of (model, batch) if
    its first parameter is called ``model``; without one the model returns its loss. `budget` is one of
    ``{"loss": 0.005}``, the share by which the loss may be above that in high precision, reached with as few bits as
    possible; ``{"bits": 6.0}``, the mean bits of an element, by FLOPs; ``{"memory": 0.5}``, the bytes of all operands,
    and ``{"time": 0.8}``, the estimated time of all matmuls on `card`, each as a share of that in high precision.

    Settings: `steps` of a training that measures a choice (32, or one for each batch; 0 measures inference),
    `optimizer`, a function of the parameters (AdamW, 1e-3), `exclude`, a regular expression for layers that stay in
    high precision, `card`, `time_limit` in seconds, and `file`, in which what is measured is kept, so that the same
    search goes on from it.

    First every operand has an estimate of the loss that each candidate costs, from the errors of its products and their
    gradients, in high precision; then choices are measured, all in one compiled graph, and the recipe in the end as it
    will run. The model, its gradients and the random state are as before afterwards. Equal seeds give equal recipes.

    Raises OptionError for a budget that cannot be kept, and where the model cannot be trained on the data.
    """
    check_model(model, "searched")
    search = _Search(model, data, loss, _candidates(candidates), _budget(budget), seed, dict(settings))
    with progress("search", search.state):
        return search.run()


SETTINGS = ("steps", "optimizer", "exclude", "card", "time_limit", "file")


def _candidates(candidates: Any) -> list[Recipe]:
    if isinstance(candidates, str | Recipe):
        candidates = [candidates]
    recipes = [resolve(candidate) for candidate in candidates]
    recipes = [recipe.recipe if isinstance(recipe, AutoRecipe) else recipe for recipe in recipes]
    recipes = [recipe for recipe in dict.fromkeys(recipes) if not isinstance(recipe, HighPrecision)]
    if not recipes:
        raise ArgumentError("fxquant.search needs candidates: recipes or their names, such as ['nvfp4', 'mxfp8']")
    return recipes


def _budget(budget: Any) -> tuple[str, float]:
    budget = {"loss": 0.005} if budget is None else budget
    if not isinstance(budget, Mapping) or len(budget) != 1:
        raise ArgumentError(f"fxquant.search: budget must be a dict with one of {', '.join(KINDS)}, not {budget!r}")
    ((kind, limit),) = budget.items()
    if kind not in KINDS:
        raise ArgumentError(f"fxquant.search: unknown budget {kind!r}{did_you_mean(kind, KINDS) or ';'} known: {KINDS}")
    if not isinstance(limit, int | float) or isinstance(limit, bool) or not limit > 0:
        raise ArgumentError(f"fxquant.search: the limit of {kind!r} must be a number above 0, not {limit!r}")
    return kind, float(limit)


class _Search:
    """One search, step by step."""

    def __init__(
        self, model: Any, data: Any, loss: Callable[..., Any] | None, recipes: Sequence[Recipe],
        budget: tuple[str, float], seed: int, settings: dict[str, Any],
    ) -> None:  # fmt: skip
        for name in settings:
            if name not in SETTINGS:
                hint = did_you_mean(name, SETTINGS) or "."
                names = ", ".join(SETTINGS)
                raise ArgumentError(f"fxquant.search got an unexpected keyword {name!r}{hint} Known settings: {names}")
        if not isinstance(model, nn.Module):
            raise OptionError("fxquant.search trains a module, whose parameters it knows; wrap a function in one")
        batches = batches_of(data)
        steps = settings.get("steps")
        steps = max(32, len(batches)) if steps is None else steps
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
            raise ArgumentError(f"fxquant.search: steps must be a number of training steps, not {steps!r}")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            steps = 0
        self.training = Training(model, batches, loss, steps, settings.get("optimizer") or adamw)
        self.model, self.recipes, self.kind, self.limit = model, list(recipes), *budget
        self.exclude, self.card = settings.get("exclude"), settings.get("card") or ""
        self.trials = Trials(model, None, seed)
        self.end = math.inf if settings.get("time_limit") is None else time.monotonic() + float(settings["time_limit"])
        about = {
            "model": [(name, list(p.shape), str(p.dtype)) for name, p in model.named_parameters()],
            "candidates": [recipe.fingerprint() for recipe in recipes],
            "data": [[list(x.shape), float(x.sum())] for x in tree_leaves(batches) if isinstance(x, Tensor)],
            "steps": steps, "seed": seed, "exclude": str(self.exclude),
            "torch": torch.__version__,
        }  # fmt: skip
        self.measured = Measured(settings.get("file"), about)
        self.space: Space
        self.emulation: Emulation
        self.compiled: Any = None
        self.plain, self.rows = math.nan, list[dict[str, Any]]()
        self.effects: dict[tuple[Operand, int], float] = {}
        self.errors: dict[tuple[Operand, int], float] = {}
        self.alone: dict[Operand, tuple[float, float]] = {}
        self.doing, self.runs = "beginning", 0
        self.chosen: Chosen = {}
        self.way: tuple[Chosen, list[Step]] = ({}, [])
        self.points: list[Point] = []
        self.switched = True

    def state(self) -> str:
        """Says how far it is."""
        return f"{self.doing}, {self.runs} runs measured"

    def run(self) -> SearchResult:
        self._look()
        self.space = Space(self.recipes, self.trials.decisions or self._decisions(HighPrecision()), self.card)
        self.space.cost(self.kind, {})
        for i, recipe in enumerate(self.recipes):
            self.doing = f"measuring {recipe} everywhere"
            score = self._real(recipe, f"uniform {i}")
            decisions = self.trials.decisions or self._decisions(recipe)
            self.space.add(i, decisions, self._excluded(decisions))
            self._add_point(self.space.mended(self._uniform(i)), score, str(recipe))
        if not self.space.units:
            raise RecipeError("no candidate quantizes anything of this model: fxquant.explain shows every operand")
        self.switched = all(role.module_type in ROLES for role in self.space.roles.values())
        self._estimate()
        numbered = Switchable()
        self.trials.run(numbered, lambda compiled: self._with(compiled, numbered))
        return self._finish()

    def _with(self, compiled: Any, numbered: Switchable) -> None:
        """Measures and chooses, in the graph that has a switch at every operand."""
        self.compiled, self.emulation = compiled, Emulation(numbered)
        if self.training.steps:
            self._calibrate()
        self._measure_alone()
        self.chosen = self._under_budget()

    # -- runs

    def _real(self, recipe: Recipe, key: str) -> float:
        """The loss under a recipe as it will run."""
        stored = self.measured.get(key)
        self.trials.decisions = []
        if stored is not None:
            return float(stored)
        losses = self.trials.run(recipe, self.training.run)
        self.runs += 1
        score = self.training.score(losses)
        self.measured.put(key, score)
        return score

    def _decisions(self, recipe: Recipe) -> list[Any]:
        """The decisions under a recipe whose loss is known from a file."""
        one = Training(self.model, self.training.batches[:1], self.training.loss, min(1, self.training.steps), adamw)
        self.trials.run(recipe, one.run)
        return self.trials.decisions

    def loss(self, chosen: Chosen) -> float:
        """The loss under a choice, in the graph with switches; one that is known is not measured again."""
        key = key_of(chosen)
        stored = self.measured.get(key)
        if stored is not None:
            return float(stored)
        if not self.switched:
            score = self.training.score(self.trials.run(self._recipe(chosen), self.training.run))
        else:
            self.emulation.choose(self.recipes, chosen)
            with kept_state(self.model), self.emulation.running():
                torch.manual_seed(self.trials.seed)
                score = self.training.score(self.training.run(self.compiled))
        self.runs += 1
        self.measured.put(key, score)
        self._add_point(chosen, score)
        log.info("search: %d operands quantized, loss %g", len(chosen), score)
        return score

    def gap(self, chosen: Chosen) -> float:
        """The share by which the loss under a choice is above that of the same graph in high precision."""
        plain = self.loss({})
        return (self.loss(chosen) - plain) / max(abs(plain), 1e-30)

    def _add_point(self, chosen: Chosen, score: float, name: str = "") -> None:
        space = self.space
        cost = {kind: space.cost(kind, chosen) for kind in ("bits", "memory")}
        cost |= {"time": space.time(chosen)} if self.kind == "time" else {}
        gap = (score - self.plain) / max(abs(self.plain), 1e-30)
        self.points.append(Point(cost, score, gap, space.coverage(chosen), dict(chosen), name))

    def _over(self) -> bool:
        return time.monotonic() > self.end

    def _uniform(self, i: int, forward: bool | None = None) -> Chosen:
        """A candidate everywhere, or in products of the forward or backward alone."""
        return {
            operand: i
            for operand, options in self.space.options.items()
            if i in options and forward in (None, is_of_forward(operand))
        }

    def _excluded(self, decisions: Sequence[Any]) -> list[str]:
        layers = {decision.layer for decision in decisions}
        return [layer for layer in layers if self.exclude and re.fullmatch(self.exclude, layer)]

    def _recipe(self, chosen: Chosen) -> CustomRecipe:
        roles = self.space.roles | self.space.excluded
        return recipe_of(self.recipes, {operand: chosen.get(operand) for operand in roles}, roles)

    # -- estimates

    def _look(self) -> None:
        """Trains without quantization, with a probe that tries every candidate in the first step and the last."""
        self.doing = "measuring the unquantized model"
        stored, rows = self.measured.get("plain"), self.measured.get("rows")
        self.trials.decisions = []
        if stored is None or rows is None:
            every = max(self.training.steps - 1, 1) if self.training.steps else 2  # the first step, and the last
            losses, rows = self.trials.measured(HighPrecision(), request_of(self.recipes), every, self._train_probed)
            self.runs += 1
            stored = self.training.score(losses)
            rows = [{name: _as_json(row.get(name)) for name in _KEPT} for row in rows if row["whatif"]]
            self.measured.put("progress", losses[0] - stored if losses else 0.0)
            self.measured.put("rows", rows)
            self.measured.put("plain", stored)
        self.plain, self.rows = float(stored), [{k: _from_json(v) for k, v in row.items()} for row in rows]
        if not math.isfinite(self.plain):
            raise OptionError(f"the loss of the unquantized model is not finite in {self.training.steps} steps")

    def _train_probed(self, compiled: Any, session: Session) -> list[float]:
        if self.training.steps:

            def begin(step: int) -> None:
                session.stepped = step > 0

            return self.training.run(compiled, begin)
        with torch.enable_grad():
            loss = loss_of(self.training.loss, compiled, self.training.batches[0])
            if loss.requires_grad:
                torch.autograd.backward([loss])
        session.end_step()
        return self.training.run(compiled)

    def _estimate(self) -> None:
        """Makes estimates of the loss that each candidate costs in each operand of what the probe has seen."""
        matmuls = frozenset(role.name for role in self.space.roles.values() if role.module_type == "matmul")
        seen, shares = Sensitivity.of(self.rows, matmuls), self._shares()
        gained = max(abs(float(self.measured.get("progress") or 0.0)), 0.05 * abs(self.plain))
        for operand, options in self.space.options.items():
            for i in options:
                key = (operand, i)
                usual = seen.squares.get(key, 0.0) * gained * shares.get(operand, 1.0)
                self.effects[key] = seen.losses.get(key, usual)
                self.errors[key] = seen.errors.get(key, 0.0)

    def _shares(self) -> dict[Operand, float]:
        """The share of the weights whose gradients an operand of the backward has a part in."""
        sizes: dict[str, float] = {}
        for decision in self.space.decisions:
            if decision.role.tensor_type == "weight":
                sizes[decision.layer] = math.prod(s for s in decision.shape if isinstance(s, int))
        total, before, shares = sum(sizes.values()) or 1.0, 0.0, {}
        for layer, size in sizes.items():
            for role, direction, behind in (
                ("grad_output", "rowwise", before), ("weight", "columnwise", before),
                ("grad_output", "columnwise", size), ("input", "columnwise", size),
            ):  # fmt: skip
                shares[Operand(layer, role, direction)] = behind / total
            before += size
        return shares

    def _calibrate(self) -> None:
        """Scales the estimates: those of the whole forward, and of the whole backward, add up to what is measured."""
        self.doing = "measuring forward and backward alone"
        for i in range(len(self.recipes)):
            for forward in (True, False):
                operands = [key for key in self.effects if key[1] == i and is_of_forward(key[0]) is forward]
                total = sum(self.effects[key] for key in operands)
                if self._over() or not operands or not 0 < total < math.inf:
                    continue
                change = self.gap(self._uniform(i, forward)) * abs(self.plain)
                if math.isfinite(change):
                    factor = max(change, _FLOOR * abs(self.plain)) / total
                    self.effects |= {key: self.effects[key] * factor for key in operands}

    def _measure_alone(self) -> None:
        """Measures operands alone, and left out of the cheapest choice: those with the largest estimates or none."""
        self.doing = "measuring operands alone"
        for unit in self.space.units:  # attention and experts
            for i in range(len(self.recipes)) if self.space.roles[unit[0]].module_type not in ROLES else ():
                if not self._over() and (chosen := self.space.of_group(unit, i)):
                    change = max(self.gap(chosen), 0.0) * abs(self.plain)
                    self.effects |= {(operand, i): change / len(chosen) for operand in chosen}
        cheapest, _ = self.space.path("bits", self.effects)
        largest = sorted(cheapest, key=lambda operand: -self.effects.get((operand, cheapest[operand]), 0.0))
        for operand in largest[:_ALONE]:
            if self._over() or self.effects.get((operand, cheapest[operand]), 0.0) < _FLOOR * abs(self.plain):
                break
            unit = next(unit for unit in self.space.units if operand in unit)
            alone = {member: cheapest[member] for member in unit if member in cheapest}
            rest = {member: i for member, i in cheapest.items() if member not in unit}
            self.alone[operand] = (self.gap(alone), self.gap(cheapest) - self.gap(self.space.mended(rest)))

    # -- the choice

    def _under_budget(self) -> Chosen:
        self.doing = f"choosing under {self.kind} {self.limit:g}"
        cheapest, steps = self.way = self.space.path(self.kind, self.effects)
        if self.kind == "loss":
            return self._least_bits(cheapest, steps)
        if not self._is_within(cheapest):
            least = self.space.cost(self.kind, cheapest)
            raise OptionError(f"no choice of these candidates has {self.kind} {self.limit:g}: the least is {least:.3g}")
        low, high = 0, len(steps) + 1  # numbers of steps that are within the budget, and are not
        while high - low > 1:
            middle = (low + high) // 2
            within = self._is_within(self.space.along(self.kind, cheapest, steps[:middle]))
            low, high = (middle, high) if within else (low, middle)
        choices = [
            self.space.along(self.kind, cheapest, steps[:k]) for k in dict.fromkeys((low, low * 3 // 4, low // 2))
        ]
        uniform = [self.space.mended(self._uniform(i)) for i in range(len(self.recipes))]
        choices += filter(self._is_within, uniform)
        best = choices[0]
        for chosen in choices:
            if not self._over() and self.loss(chosen) < self.loss(best):
                best = chosen
        return best

    def _is_within(self, chosen: Chosen) -> bool:
        return self.space.cost(self.kind, chosen) <= self.limit * (1 + 1e-9)

    def _least_bits(self, cheapest: Chosen, steps: Sequence[Step]) -> Chosen:
        """The shortest way from the cheapest choice that keeps the loss, and of it what is needed."""
        low, high, stride = -1, 0, 1  # numbers of steps with which the loss is too high, and is kept
        while high < len(steps) and not self._over() and not self._keeps(cheapest, steps[:high]):
            low, high, stride = high, min(len(steps), high + stride), stride * 2
        while high - low > 1 and not self._over():
            middle = (low + high) // 2
            kept = self._keeps(cheapest, steps[:middle])
            low, high = (low, middle) if kept else (middle, high)
        chosen = self.space.along(self.kind, cheapest, self._pruned(cheapest, list(steps[:high])))
        for i in range(len(self.recipes)):
            uniform = self.space.mended(self._uniform(i))
            fewer = self.space.bits(uniform) < self.space.bits(chosen)
            if fewer and self.points[i].gap <= self.limit:
                chosen = uniform
        return chosen

    def _keeps(self, cheapest: Chosen, steps: Sequence[Step]) -> bool:
        return self.gap(self.space.along(self.kind, cheapest, steps)) <= self.limit

    def _pruned(self, cheapest: Chosen, steps: list[Step]) -> list[Step]:
        """The steps without those that can be taken back: halves, quarters and eighths of them, one by one if few."""
        size, least = len(steps), max(1, len(steps) // 8)
        while size > least and not self._over():
            size = max(least, size // 2)
            end = len(steps)
            while end > 0 and not self._over():
                rest = [*steps[: max(0, end - size)], *steps[end:]]
                end = max(0, end - size)
                if self._keeps(cheapest, rest):
                    steps = rest
        return steps

    def _finish(self) -> SearchResult:
        """Measures the recipe as it will run, and gives it more precision until it keeps an allowed loss."""
        self.doing = "measuring the recipe"
        chosen, (_, steps) = self.chosen, self.way
        for count in (1, 2, 4, 8, 0):
            recipe = self._recipe(chosen)
            score = self._real(recipe, f"recipe {key_of(chosen)}")
            self._add_point(chosen, score, "result")
            if self.kind != "loss" or self.points[-1].gap <= self.limit or not count or self._over():
                break
            taken = [step for step in steps if not self._has(chosen, step)][:count]
            chosen = self.space.along(self.kind, chosen, taken)
        result = self.points[-1]
        effects = [
            Effect(*operand, str(self.recipes[i]), self.errors[operand, i], effect, self.alone.get(operand))
            for (operand, i), effect in self.effects.items()
        ]
        effects.sort(key=lambda effect: -effect.effect)
        return SearchResult(
            recipe=recipe, front=pareto(self.points, self.kind), uniform=self.points[: len(self.recipes)],
            loss=score, plain=self.plain, gap=result.gap, cost=result.cost, coverage=result.quantized, effects=effects,
            runs=self.runs, budget={self.kind: self.limit},
            chosen={operand: str(self.recipes[i]) for operand, i in chosen.items()},
        )  # fmt: skip

    def _has(self, chosen: Chosen, step: Step) -> bool:
        """Returns True if the operands of a step have its candidate already, or none."""
        group = self.space.groups(self.kind)[step.group]
        return all(chosen.get(operand) in (None, step.candidate) for operand in group)


def is_of_forward(operand: Operand) -> bool:
    """Returns True for an operand of a product of the forward."""
    return operand.direction == "rowwise" and operand.role not in ("grad_output", "do", "dp")


_KEPT = ("layer", "role", "direction", "candidate", "whatif", "sqnr", "product_error", "loss_change")


def _as_json(value: Any) -> Any:
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def _from_json(value: Any) -> Any:
    return float(value) if value in ("inf", "-inf") else value
