"""`fxquant.search`: a format for each operand of a model, under a budget."""

from __future__ import annotations

import logging
import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fxquant.backend.options import check_model
from fxquant.backend.probing import Session
from fxquant.checks import checked
from fxquant.compat.private import tree_leaves
from fxquant.errors import ArgumentError, OptionError, RecipeError
from fxquant.recipes import CustomRecipe, HighPrecision, Recipe
from fxquant.recipes.operands import Operand
from fxquant.tools.cut import best_of, not_worse, sentence
from fxquant.tools.emulation import ROLES
from fxquant.tools.least_bits import OUTLIER, LeastBits, Tolerance
from fxquant.tools.losses import MOST, Losses, share
from fxquant.tools.measured import Measured, key_of
from fxquant.tools.patterns import recipe_of
from fxquant.tools.progress import progress
from fxquant.tools.result import Effect, Point, SearchResult, pareto
from fxquant.tools.sensitivity import Sensitivity, from_json, request_of, signs, to_json, unfit
from fxquant.tools.space import Chosen, Path, Space, Step
from fxquant.tools.training import OutOfTime, Training, adamw, loss_of
from fxquant.tools.trials import Trials, batches_of
from fxquant.tools.wanted import budget_of, candidates_of, check_settings

log = logging.getLogger(__name__)
_FLOOR = 2e-4
"""A change of the loss below this share of it is taken for noise."""


_ALONE = 3
"""The operands that are measured alone."""

_RESOLVED = 0.5
"""The standard error of a gap as a share of the limit that is small enough to tell them apart."""


@checked(
    ArgumentError,
    called="fxquant.search",
    takes={
        "model": "a module",
        "data": "a batch (a tensor, a tuple of arguments or a dict of keywords), or a list of them",
        "candidates": 'a list of recipes, their names or quantizers, such as ["nvfp4", "mxfp8"], or a dict of them',
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

    `candidates` are recipes, their names, or quantizers for all operands of linear layers; a dict of them by names of
    yours lets tables call them so. The result is made of their answers.

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
    search = _Search(model, data, loss, candidates_of(candidates), budget_of(budget), seed, dict(settings))
    with progress("search", search.state):
        return search.run()


class _Search:
    """One search, step by step."""

    def __init__(
        self, model: Any, data: Any, loss: Callable[..., Any] | None, candidates: Mapping[str, Recipe],
        budget: tuple[str, float], seed: int, settings: dict[str, Any],
    ) -> None:  # fmt: skip
        check_settings(settings)
        if not isinstance(model, nn.Module):
            raise OptionError("fxquant.search trains a module, whose parameters it knows; wrap a function in one")
        batches = batches_of(data)
        steps = settings.get("steps")
        steps = max(32, len(batches)) if steps is None else steps
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
            raise ArgumentError(f"fxquant.search: steps must be a number of training steps, not {steps!r}")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            steps = 0
        self.seconds = math.inf if settings.get("time_limit") is None else float(settings["time_limit"])
        self.end = time.monotonic() + self.seconds
        optimizer = settings.get("optimizer") or adamw
        self.training = Training(model, batches, loss, steps, optimizer, end=self.end)
        self.names, self.recipes = list(candidates), list(candidates.values())
        self.model, self.kind, self.limit = model, *budget
        self.exclude, self.card = settings.get("exclude"), settings.get("card") or ""
        self.trials = Trials(model, None, seed)
        about = {
            "model": [(name, list(p.shape), str(p.dtype)) for name, p in model.named_parameters()],
            "candidates": [recipe.fingerprint() for recipe in self.recipes],
            "data": [[list(x.shape), float(x.sum())] for x in tree_leaves(batches) if isinstance(x, Tensor)],
            "steps": steps, "seed": seed, "exclude": str(self.exclude),
            "torch": torch.__version__,
        }  # fmt: skip
        self.measured = Measured(settings.get("file"), about)
        self.losses = Losses(self.training, self.trials, self.measured, self.recipes)
        self.space = Space(self.recipes, [], self.card)
        self.plain, self.rows = math.nan, list[dict[str, Any]]()
        self.effects: dict[tuple[Operand, int], float] = {}
        self.errors: dict[tuple[Operand, int], float] = {}
        self.alone: dict[Operand, tuple[float, float]] = {}
        self.unfit: Mapping[tuple[Operand, int], int] = {}
        self.signs: Mapping[tuple[Operand, int], str] = {}
        self.note = ""
        self.spread = self.chance = 0.0
        """The standard deviation of a gap from one order of the batches to another, and that of its mean."""
        self.doing = "beginning"
        self.chosen: Chosen = {}
        self.way: Path

    def state(self) -> str:
        """Says how far it is."""
        return f"{self.doing}, {self.losses.runs} runs measured"

    def run(self) -> SearchResult:
        """Searches until it is done, or time is over."""
        try:
            return self._search()
        except OutOfTime:
            return self._cut()

    def _search(self) -> SearchResult:
        self._look()
        self.space = Space(self.recipes, self.trials.decisions or self._decisions(HighPrecision()), self.card)
        self.space.cost(self.kind, {})
        for i, recipe in enumerate(self.recipes):
            self.doing = f"measuring {self.names[i]} everywhere"
            self.losses.real(recipe, f"uniform {i}")
            decisions = self.trials.decisions or self._decisions(recipe)
            self.space.add(i, decisions, self._excluded(decisions))
        if not self.space.units:
            raise RecipeError("no candidate quantizes anything of this model: fxquant.explain shows every operand")
        self._estimate()
        self.losses.roles, self.losses.recipe_of = self.space.roles, self._recipe
        self._measure_groups()
        if self.training.steps:
            self._calibrate()
        self.way = self.space.path(self.kind, self.effects, self.unfit)
        if self.kind == "loss" and self.training.steps:
            self._find_noise()
        self.chosen = self._under_budget()
        self._measure_alone()
        return self._finish()

    # -- runs

    def _decisions(self, recipe: Recipe) -> list[Any]:
        """The decisions under a recipe whose loss is known from a file."""
        one = replace(self.training, batches=self.training.batches[:1], steps=min(1, self.training.steps))
        self.trials.run(recipe, one.run)
        return self.trials.decisions

    def gap(self, chosen: Chosen) -> float:
        """The share by which the loss under a choice is above that in high precision."""
        return self.losses.gap(chosen)

    def _point(self, chosen: Chosen, loss: float, plain: float, name: str = "") -> Point:
        space = self.space
        cost = {kind: space.cost(kind, chosen) for kind in ("bits", "memory")}
        cost |= {"time": space.time(chosen) if space.decisions else 1.0} if self.kind == "time" else {}
        return Point(cost, loss, share(loss, plain), space.coverage(chosen), dict(chosen), name)

    def _points(self) -> list[Point]:
        """The choices that were measured in all orders so far; behind the time limit, in any."""
        counts = [(chosen, self.losses.count(chosen)) for chosen in self.losses.tried.values() if chosen]
        least = 1 if self._over() else self.losses.orders
        seen = [(chosen, min(count, self.losses.orders)) for chosen, count in counts if count >= least]
        return [self._point(chosen, self.losses.of(chosen, n), self.losses.of({}, n)) for chosen, n in seen]

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
        rows = self.measured.get("rows")
        self.trials.decisions = []
        if rows is None or self.measured.get("plain") is None:
            every = max(self.training.steps - 1, 1) if self.training.steps else 2  # the first step, and the last
            losses, rows = self.trials.measured(HighPrecision(), request_of(self.recipes), every, self._train_probed)
            rows = to_json(rows)
            self.measured.put("progress", losses[0] - self.training.score(losses) if losses else 0.0)
            self.measured.put("rows", rows)
            self.losses.put("plain", losses)
            if not self.training.steps:
                self.trials.decisions = []  # with those of gradients, which inference does not take
        self.plain = float(self.measured.get("plain"))
        self.rows = from_json(rows)
        if not math.isfinite(self.plain):
            raise OptionError(f"the loss of the unquantized model is not finite in {self.training.steps} steps")

    def _train_probed(self, compiled: Any, session: Session) -> list[float]:
        if self.training.steps:

            def begin(step: int) -> None:
                session.stepped = step > 0

            return self.training.run(compiled, begin)
        with torch.enable_grad():
            self.training.check_time()
            loss = loss_of(self.training.loss, compiled, self.training.batches[0])
            self.training.check_time()
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
        self.unfit = unfit(seen)
        self.signs = signs(seen, self.unfit)
        for operand, i in self.unfit:  # whose estimate may miss what it costs
            if (operand, i) in self.effects:
                others = [
                    self.effects[operand, j] for j in self.space.options[operand] if (operand, j) not in self.unfit
                ]
                self.effects[operand, i] = max(
                    self.effects[operand, i], 2 * max(others, default=0.0), _FLOOR**2 * abs(self.plain)
                )

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
        """Scales the estimates: those of the whole forward, and of the whole backward, add up to what is measured.

        That is the candidate which costs most, since less is lost in chance. Operands for which it is unfit are left
        out: they would hide all others.
        """
        self.doing = "measuring forward and backward alone"
        for forward in (True, False):
            fit = [
                {o: i for o in self._uniform(i, forward) if (o, i) not in self.unfit and self._is_switched(o)}
                for i in range(len(self.recipes))
            ]
            totals = [sum(self.effects[key] for key in alike.items()) for alike in fit]
            total, alike = max(zip(totals, fit, strict=True), key=lambda pair: pair[0])
            if self._over() or not 0 < total < math.inf:
                continue
            change = self.gap(self.space.mended(alike)) * abs(self.plain)
            if math.isfinite(change):
                factor = max(change, _FLOOR * abs(self.plain)) / total
                scaled = [(o, i) for o, i in self.effects if is_of_forward(o) is forward and self._is_switched(o)]
                self.effects |= {key: self.effects[key] * factor for key in scaled}

    def _is_switched(self, operand: Operand) -> bool:
        """Returns True for an operand that is estimated, and chosen, by itself: of no attention, and of no expert."""
        return self.space.roles[operand].module_type in ROLES

    def _measure_groups(self) -> None:
        """Measures attention and experts alone."""
        self.doing = "measuring attention and experts"
        for unit in self.space.units:
            for i in range(len(self.recipes)) if not self._is_switched(unit[0]) else ():
                if not self._over() and (chosen := self.space.of_group(unit, i)):
                    change = max(self.gap(chosen), 0.0) * abs(self.plain)
                    self.effects |= {(operand, i): change / len(chosen) for operand in chosen}

    def _find_noise(self) -> None:
        """Finds in how many orders of the batches a gap as large as the limit is seen above chance.

        Measured with the cheapest candidate in all operands but outliers.
        """
        self.doing = "measuring what is chance"
        chosen = self.way.along(step for step in self.way.steps if step.first >= OUTLIER)
        orders, wanted = 1, self.limit * _RESOLVED
        while chosen and orders < MOST and not self._over():
            orders = 3 if orders == 1 else orders + 1
            gaps = self.losses.gaps(chosen, orders)
            if not all(map(math.isfinite, gaps)):
                break
            self.spread = statistics.stdev(gaps)
            orders = 1 if self.spread <= wanted else orders
            self.chance = self.spread / math.sqrt(orders)
            if self.chance <= wanted:
                break
        self.chance = min(self.chance, wanted)
        self.losses.orders = orders

    def _measure_alone(self) -> None:
        """Measures the operands with the largest estimates alone, and left out of the cheapest choice."""
        self.doing = "measuring operands alone"
        cheapest = self.way.cheapest
        largest = sorted(cheapest, key=lambda operand: -self.effects.get((operand, cheapest[operand]), 0.0))
        for operand in largest[:_ALONE]:
            if self._over() or self.effects.get((operand, cheapest[operand]), 0.0) < _FLOOR * abs(self.plain):
                break
            unit = next(unit for unit in self.space.units if operand in unit)
            alone = {member: cheapest[member] for member in unit if member in cheapest}
            rest = {member: i for member, i in cheapest.items() if member not in unit}
            whole, without = (self.losses.gap(chosen, 1) for chosen in (cheapest, self.space.mended(rest)))
            self.alone[operand] = (self.losses.gap(alone, 1), whole - without)

    # -- the choice

    def _under_budget(self) -> Chosen:
        self.doing = f"choosing under {self.kind} {self.limit:g}"
        cheapest, steps = self.way.cheapest, self.way.steps
        if self.kind == "loss":
            return self._least_bits()
        if not self._is_within(cheapest):
            least = self.space.cost(self.kind, cheapest)
            raise OptionError(f"no choice of these candidates has {self.kind} {self.limit:g}: the least is {least:.3g}")
        low, high = 0, len(steps) + 1  # numbers of steps that are within the budget, and are not
        while high - low > 1:
            middle = (low + high) // 2
            within = self._is_within(self.way.along(steps[:middle]))
            low, high = (middle, high) if within else (low, middle)
        least = min(low, sum(step.first >= OUTLIER for step in steps))  # outliers come first, and stay protected
        choices = [
            self.way.along(steps[:k]) for k in dict.fromkeys((low, max(least, low * 3 // 4), max(least, low // 2)))
        ]
        uniform = [self.space.mended(self._uniform(i)) for i in range(len(self.recipes))]
        choices += filter(self._is_within, uniform)
        best = choices[0]
        for chosen in choices:
            if not self._over() and self.gap(chosen) < self.gap(best):
                best = chosen
        return best

    def _least_bits(self) -> Chosen:
        tolerance = Tolerance(self.losses, self.limit, self.spread, self.chance)
        least = LeastBits(self.space, tolerance, self.effects, self.unfit, self._over)
        chosen, self.way = least.search(self.way)
        hurt = {i for (_, i), level in self.unfit.items() if level >= OUTLIER}
        for i in set(range(len(self.recipes))) - hurt:
            uniform = self.space.mended(self._uniform(i))
            fewer = self.space.bits(uniform) < self.space.bits(chosen)
            if fewer and not self._over() and tolerance.keeps(uniform, 1.0):
                chosen = uniform
        return chosen

    def _is_within(self, chosen: Chosen) -> bool:
        return self.space.cost(self.kind, chosen) <= self.limit * (1 + 1e-9)

    def _finish(self) -> SearchResult:
        """Measures the recipe as it will run, and gives it more precision until it keeps an allowed loss."""
        self.doing = "measuring the recipe"
        self.losses.orders = 1 if self._over() else self.losses.orders
        chosen, losses, points = self.chosen, self.losses, self._points()
        plain = losses.real(HighPrecision(), "plain")
        count, taken = 1, list[Step]()
        while True:
            recipe = self._recipe(chosen)
            result = self._point(chosen, losses.real(recipe, f"recipe {key_of(chosen)}"), plain, "result")
            taken = [step for step in self.way.steps if not self._has(chosen, step)][:count]
            if self.kind != "loss" or result.gap <= self.limit or not taken or self._over():
                break
            if 1 < losses.orders <= MOST and result.gap - self.chance <= self.limit:  # which may be chance
                losses.orders *= 2
                plain = losses.real(HighPrecision(), "plain")
                continue
            chosen, count = replace(self.way, cheapest=chosen).along(taken), 2 * count
        uniform = [
            self._point(
                self.space.mended(self._uniform(i)), losses.real(candidate, f"uniform {i}"), plain, self.names[i]
            )
            for i, candidate in enumerate(self.recipes)
        ]
        least, self.note = not_worse(result, uniform, self.kind, self.limit)
        recipe = recipe if least is result else self._recipe(dict(least.chosen))
        return self._result(recipe, least, plain, uniform, points)

    def _result(
        self, recipe: CustomRecipe, result: Point, plain: float, uniform: list[Point], points: list[Point],
        cut: str = "",
    ) -> SearchResult:  # fmt: skip
        effects = [
            Effect(*operand, self.names[i], self.errors[operand, i], effect, self.alone.get(operand))
            for (operand, i), effect in self.effects.items()
        ]
        effects.sort(key=lambda effect: -effect.effect)
        seen = [point for point in (*uniform, result, *points) if not math.isnan(point.loss)]
        return SearchResult(
            recipe=recipe, front=pareto(seen, self.kind), uniform=uniform, loss=result.loss, plain=plain,
            gap=result.gap, cost=result.cost, coverage=result.quantized, effects=effects, runs=self.losses.runs,
            orders=self.losses.orders, budget={self.kind: self.limit},
            chosen={operand: self.names[i] for operand, i in result.chosen.items()}, cut=cut, note=self.note,
            signs={(operand, self.names[i]): sign for (operand, i), sign in self.signs.items()},
            outliers=frozenset((o, self.names[i]) for o, i in self.space.cheapest() if self._is_outlier(o, i)),
        )  # fmt: skip

    def _is_outlier(self, operand: Operand, candidate: int) -> bool:
        return self.unfit.get((operand, candidate), 0) >= OUTLIER

    def _cut(self) -> SearchResult:
        """The best of what was measured, without another step."""
        if not self.space.decisions:
            self.space = Space(self.recipes, self.trials.decisions, self.card)
        plain = self.losses.known("plain")
        uniform = [
            self._point(self.space.mended(self._uniform(i)), self.losses.known(f"uniform {i}"), plain, name)
            for i, name in enumerate(self.names)
            if self.losses.knows(f"uniform {i}") and self._uniform(i)
        ]
        points = self._points()
        within = lambda point: self._is_within(point.chosen)  # noqa: E731
        result = best_of([*uniform, *points], self.kind, self.limit, self.unfit, within) or self._unmeasured(plain)
        return self._result(
            self._recipe(dict(result.chosen)), result, plain, uniform, points,
            sentence(self.seconds, self.doing, result, self.kind),
        )  # fmt: skip

    def _unmeasured(self, plain: float) -> Point:
        """The choice within a budget by estimates, or high precision."""
        chosen = Chosen()
        if self.kind != "loss" and self.effects:
            way = self.space.path(self.kind, self.effects, self.unfit)
            steps = [*way.steps]
            while steps and not self._is_within(way.along(steps)):
                steps.pop()
            chosen = way.along(steps)
        return self._point(chosen, math.nan if chosen else plain, plain)

    def _has(self, chosen: Chosen, step: Step) -> bool:
        """Returns True if the operands of a step have its candidate already, or none."""
        group = self.way.groups[step.group]
        return all(chosen.get(operand) in (None, step.candidate) for operand in group)


def is_of_forward(operand: Operand) -> bool:
    """Returns True for an operand of a product of the forward."""
    return operand.direction == "rowwise" and operand.role not in ("grad_output", "do", "dp")
