"""`fxquant.bisect`: the smallest set of operands whose quantization breaks a check."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxquant.backend.options import check_model
from fxquant.checks import article, checked, did_you_mean
from fxquant.compat.private import tree_leaves
from fxquant.errors import ArgumentError, OptionError, RecipeError
from fxquant.recipes import HighPrecision, Recipe, resolve
from fxquant.recipes.operands import Operand, PerOperand
from fxquant.tools.progress import progress
from fxquant.tools.sensitivity import errors_of
from fxquant.tools.switched import Chosen, SwitchedModel, may_switch
from fxquant.tools.trials import Trials, batches_of, call, is_batch, loss_in, operands_of

log = logging.getLogger(__name__)

Unit = tuple[Operand, ...]
Check = Callable[[Any, Any], Any]

CHECKS = ("nan", "loss", "differs")
"""The checks that need no function; the last two have a bound."""

_FRONT = 64
"""The operands among which is looked first: with six runs, behind which the last one is the twelfth in all."""


@checked(
    ArgumentError,
    called="fxquant.bisect",
    takes={
        "model": "a module or a function",
        "recipe": 'a name, such as fxquant.bisect(model, data, "mxfp8"), or a Recipe',
        "data": "a batch (a tensor, a tuple of arguments or a dict of keywords), or a list of them",
    },
)
def bisect(
    model: Any,
    data: Any,
    recipe: Recipe | str,
    check: Any = "nan",
    *,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> list[Operand]:
    """Names the smallest set of operands whose quantization under `recipe` breaks a check, as (layer, role, direction).

    `check` is one of

    - ``"nan"``: outputs and gradients are finite;
    - ``{"loss": 2.5}``: the loss that the model returns is at most 2.5;
    - ``{"differs": 0.1}``: outputs and gradients differ by at most 0.1 from unquantized ones, relative in the norm;
    - a function ``check(model, data)`` of the compiled model and the data as they were passed, which may train the
      model. It holds for the unquantized model, and breaks where it answers otherwise than there, or fails an assert.

    Runs begin from the same state of the model and the same random numbers, which both are as before afterwards. The
    operands with the largest errors on a batch come first, and behind the first those of which no error is known. With
    n operands that are quantized, one that is to blame takes at most 6 + log2(n) runs of the check, mostly 3, and at
    most 11 if it is among the first 64; each further one takes 2 + log2(n) more. A further run finds the order. One
    model is compiled, whose runs choose operands when they execute; what may be the answer is compiled by itself. None
    of the result can be left out, if no further operand mends what others break. It is empty if the check holds under
    `recipe`. Models are compiled with `options`, by default to run operator by operator (``{"inner": "aot_eager"}``).

    Raises OptionError if the check does not hold for the unquantized model, and for what is no check, and RecipeError
    if the recipe quantizes nothing.
    """
    check_model(model, "bisected")
    recipe = resolve(recipe)
    trials = Trials(model, options, seed)
    search = _Search(trials, recipe, _outcome_of(check, model, data), data)
    with progress("bisect", search.state):
        return search.smallest()


class _Search:
    """Looks for the operands that are to blame, from prefixes of all."""

    def __init__(self, trials: Trials, recipe: Recipe, outcome: Callable[[Any], Any], data: Any) -> None:
        self.trials, self.recipe, self.outcome, self.data = trials, recipe, outcome, data
        self.holds: Any = None
        self.suspects = 0
        self.model = SwitchedModel(trials, recipe) if may_switch(recipe, trials.options) else None
        self.required: Sequence[Unit] = ()
        self.proven: Sequence[Unit] = ()
        """The operands that last broke the check in a model that was compiled for them alone."""

    def state(self) -> str:
        """Says how far it is."""
        named = f", {len(self.required)} to blame" if self.required else ""
        return f"run {self.trials.runs}{named}" + (f", suspects: {self.suspects}" if self.suspects else "")

    def smallest(self) -> list[Operand]:
        """Looks in a model that is compiled once; if a run differs from a compiled one, in one that is for each run."""
        try:
            smallest = self._smallest()
        except _Differing:
            log.info("bisect: a switched run differs from a compiled one, so that each run compiles the model")
            self.model = None
            smallest = self._smallest()
        log.info("bisect: %d runs", self.trials.runs)
        return smallest

    def _smallest(self) -> list[Operand]:
        self.holds = self.run(())
        if not _may_hold(self.holds):
            self.prove((), self.holds)
            raise OptionError(f"the check does not hold for the unquantized model either: {self.holds}")
        whole = self.run(None)
        units = operands_of(self.trials.decisions, self.recipe)
        if not units:
            raise RecipeError(f"{self.recipe} quantizes nothing of this model: fxquant.explain shows every operand")
        if whole == self.holds:
            self.prove(None, whole)
            if not whole:
                raise OptionError("the check answers False for the unquantized model and for the quantized one")
            return []
        required = self.among(self.by_error(units))
        if self.model is not None and required != self.proven and not self.confirms(required):
            raise _Differing
        return _operands_of(required)

    def run(self, chosen: Chosen) -> Any:
        """The outcome of the check with the chosen operands quantized: without a compilation where that is possible."""
        if self.model is not None:
            try:
                return self.model.run(chosen, self.outcome)
            except Exception as error:
                log.info("bisect: each run compiles the model, since it cannot be switched: %s", error)
                self.model = None
        return self.compiled(chosen)

    def compiled(self, chosen: Chosen) -> Any:
        """The outcome of the check of a model that is compiled with the chosen operands quantized."""
        if chosen is None:
            return self.trials.run(self.recipe, self.outcome)
        recipe = PerOperand.of([self.recipe], dict.fromkeys(chosen, 0)) if chosen else HighPrecision()
        return self.trials.run(recipe, self.outcome)

    def prove(self, chosen: Chosen, outcome: Any) -> None:
        """Raises _Differing if a compiled model has another outcome than a switched run of it."""
        if self.model is not None and self.compiled(chosen) != outcome:
            raise _Differing

    def among(self, units: list[Unit]) -> list[Unit]:
        """The operands that are to blame, of such as break the check together; the first are looked at first."""
        required = self.required = list[Unit]()
        self.suspects = len(units)
        while not required or not self.breaks(required):
            good, bad = 0, len(units)  # the numbers of operands, from the first on, with which it holds and breaks
            while bad - good > 1:
                middle = (good + bad) // 2 if good else 1  # the first has the largest error
                middle = min(middle, _FRONT) if good < _FRONT else middle
                good, bad = (good, middle) if self.breaks([*units[:middle], *required]) else (middle, bad)
                self.suspects = bad - good
            required.append(units[bad - 1])
            units = units[: bad - 1]
            if bad == 1:
                break  # these have been tried
        return required

    def by_error(self, units: list[Unit]) -> list[Unit]:
        """The operands with the largest errors of their products on a batch first, where it runs without the check.

        Those of which nothing is known come behind the first.
        """
        if hasattr(self.data, "__next__"):  # the check's own
            return units
        try:
            errors = self.errors()
        except Exception as error:
            log.info("bisect: operands are tried in the model's order, since a batch does not run: %s", error)
            return units
        probed = [unit for unit in units if any(operand in errors for operand in unit)]
        probed.sort(key=lambda unit: -max(errors.get(operand, 0.0) for operand in unit))
        return [*probed[:1], *(unit for unit in units if unit not in probed), *probed[1:]]

    def errors(self) -> Mapping[Operand, float]:
        """The relative errors of products with each operand quantized, of one batch."""

        def use(compiled: Any) -> None:
            _results(compiled, None, self.first_batch())

        return errors_of(self.trials, self.recipe, use) if self.model is None else self.model.errors(use)

    def first_batch(self) -> list[Any]:
        """The first batch alone; it is drawn in a run, behind which the random state is as before."""
        return [self.data] if is_batch(self.data) else [next(iter(self.data))]

    def breaks(self, units: Sequence[Unit]) -> bool:
        """Returns True if the check breaks with these operands quantized and no others.

        What may be the answer is compiled as it will run: one operand, and those that are required, if a switched run
        with them breaks.
        """
        if len(units) > 1:
            if self.run(_operands_of(units)) == self.holds:
                return False
            if self.model is None or units is not self.required:
                return True
        confirmed = self.confirms(units)
        if not confirmed and len(units) > 1:
            raise _Differing
        return confirmed

    def confirms(self, units: Sequence[Unit]) -> bool:
        """Returns True if the check breaks in a model that is compiled with these operands quantized."""
        broken = bool(self.compiled(_operands_of(units)) != self.holds)
        self.proven = [*units] if broken else self.proven
        return broken


def _operands_of(units: Sequence[Unit]) -> list[Operand]:
    return [operand for unit in units for operand in unit]


class _Differing(Exception):
    """A switched run has another outcome than a model that is compiled so."""


def _may_hold(outcome: Any) -> bool:
    """Returns False for an outcome that no check means by holding: an assert that failed, or a built-in check's no."""
    return not isinstance(outcome, str)


def _outcome_of(check: Any, model: Any, data: Any) -> Callable[[Any], Any]:
    """The function of a compiled model that runs a check: it returns a text where that cannot hold."""
    if check == "nan":
        return lambda compiled: _first_nonfinite(_results(compiled, model, data))
    if isinstance(check, Mapping) and len(check) == 1 and (kind := next(iter(check))) in CHECKS[1:]:
        bound = check[kind]
        if not isinstance(bound, int | float) or isinstance(bound, bool) or not bound >= 0:
            raise ArgumentError(f"fxquant.bisect: the bound of {check!r} must be a number of at least 0")
        if kind == "loss":
            return lambda compiled: _above(compiled, data, bound)
        return _Differs(model, data, bound)
    if isinstance(check, str | Mapping) or not callable(check):
        kinds = "'nan', {'loss': bound}, {'differs': bound} or a function of (model, data)"
        shown = repr(check) if isinstance(check, str | Mapping) else article(type(check).__name__)
        asked = next(iter(check), "") if isinstance(check, Mapping) else check
        hint = did_you_mean(asked, CHECKS) if isinstance(asked, str) and asked not in CHECKS else ""
        raise ArgumentError(f"fxquant.bisect: check must be {kinds}, not {shown}{hint}")
    return lambda compiled: _asked(check, compiled, data)


def _asked(check: Check, compiled: Any, data: Any) -> Any:
    """The answer of a user's check; the text of an assert that failed."""
    try:
        answer = check(compiled, data)
    except AssertionError as error:
        return f"AssertionError {error}".strip().partition("\n")[0]
    return True if answer is None else bool(answer)


def _results(compiled: Any, model: Any, data: Any) -> dict[str, Tensor]:
    """The outputs and gradients of all batches, by name."""
    results: dict[str, Tensor] = {}
    for i, batch in enumerate(batches_of(data)):
        output = call(compiled, batch)
        leaves = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
        results |= {f"output {j} of batch {i}": x.detach().clone() for j, x in enumerate(leaves)}
        loss = loss_in(output)
        loss = loss if loss is not None else sum((x.float().square().mean() for x in leaves), torch.zeros(()))
        if loss.requires_grad:
            torch.autograd.backward([loss.sum()])
    if isinstance(model, nn.Module):
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                results[f"the gradient of {name}"] = parameter.grad.detach().clone()
    return results


def _first_nonfinite(results: Mapping[str, Tensor]) -> Any:
    return next((f"{name} is not finite" for name, x in results.items() if not x.isfinite().all()), True)


def _above(compiled: Any, data: Any, bound: float) -> Any:
    losses = [loss_in(call(compiled, batch)) for batch in batches_of(data)]
    numbers = [loss.item() for loss in losses if loss is not None]
    if not numbers:
        raise OptionError("the model returns no loss: pass a function check(model, data) that computes it")
    mean = sum(numbers) / len(numbers)
    return True if mean <= bound else f"a loss of {mean:g} is above {bound:g}"


class _Differs:
    """Compares results with those of the first run, which is that of the unquantized model."""

    def __init__(self, model: Any, data: Any, bound: float) -> None:
        self.model, self.data, self.bound = model, data, bound
        self.exact: dict[str, Tensor] = {}

    def __call__(self, compiled: Any) -> Any:
        results = _results(compiled, self.model, self.data)
        self.exact = self.exact or results
        for name, x in results.items():
            reference = self.exact[name].float()
            distance = (x.float() - reference).norm() / reference.norm().clamp_min(1e-30)
            if not distance <= self.bound:  # NaN too
                return f"{name} differs by {float(distance):g}"
        return True
