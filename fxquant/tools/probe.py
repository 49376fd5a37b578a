"""`fxquant.probe`: what quantization does to the tensors of a compiled model while it runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fxquant.backend.controls import Controls
from fxquant.backend.model import controls_of
from fxquant.backend.probing import Session
from fxquant.checks import AtLeast, checked, did_you_mean
from fxquant.compat.inside.frames import unwrapped
from fxquant.errors import ArgumentError, FxQuantWarning, OptionError, tell
from fxquant.passes.plan.layers import clean_path
from fxquant.probes import Request
from fxquant.tools.probe_log import ProbeLog


@checked(
    ArgumentError,
    called="fxquant.probe",
    takes={"freq": "write every=", "model": "the compiled model comes first, as what was compiled"},
)
@contextmanager
def probe(
    compiled: Any,
    *,
    every: Annotated[int, AtLeast(1)] = 10,
    layers: str | Iterable[str] | None = None,
    tensors: str | Iterable[str] | None = None,
    stats: str | Iterable[str] | None = None,
    whatif: Any = (),
) -> Iterator[ProbeLog]:
    """A scope in which a compiled model measures, in one step of `every`, what quantization does to its tensors.

        with fxquant.probe(compiled, every=10) as log:
            train(compiled)
        log.to_jsonl("probe.jsonl")

    `layers` are patterns that match the whole of a layer's name, `tensors` some of ``input``, ``weight`` and
    ``grad_output``, and ``q``, ``k``, ``v``, ``s`` and ``do`` of quantized attention, `stats` some of
    `fxquant.probes.STATISTICS`. `whatif` are quantizers, or recipes or their names,
    whose error on the same tensors is measured beside that of the quantizers that there are. A step ends with that of
    an optimizer; the measuring form of a graph is compiled once, and others run as they were.

    Raises OptionError for a model that fxquant has not compiled, and for what matches nothing. Warns at the end of what
    was asked for, and of which nothing was measured.
    """
    if isinstance(compiled, list | tuple):
        raise OptionError("a probe measures one model: open one for each, with fxquant.probe(a) as log, ..")
    request = Request.of(layers, tensors, stats, whatif)
    controls = controls_of(compiled)
    if any(one.session is not None for one in controls):
        raise OptionError("a probe of this model is open: close it first, or give this one its arguments")
    _check_layers(compiled, request)
    with measuring(controls, request, every) as session:
        yield ProbeLog(session)
    if not session.rows:
        what = "no layer that is quantized matches" if session.ran else "no compiled graph ran inside it"
        what = "log.unmeasured says why" if session.unmeasured else what
        tell(f"fxquant.probe measured nothing: {what}", FxQuantWarning)
    elif missed := _missed(session, request, named=tensors is not None):
        what = f"{', '.join(missed)}: no product that ran has such operands"
        tell(f"fxquant.probe measured nothing of {what}", FxQuantWarning)


@contextmanager
def measuring(controls: Iterable[Controls], request: Request, every: int) -> Iterator[Session]:
    """A scope in which what was compiled under some controls measures; a step ends with that of an optimizer.

    Rows of a step that an error has cut short are those of this rank.
    """
    controls, session = [*controls], Session(request, every)

    def stepped(*_: Any) -> None:
        session.stepped = True

    for one in controls:
        one.session = session
    hook = register_optimizer_step_post_hook(stepped)
    try:
        yield session
        session.read()
    except BaseException:
        session.read(over_ranks=False)  # what there is of the step; the other ranks may not come here
        raise
    finally:
        hook.remove()
        for one in controls:
            one.session = None


def _missed(session: Session, request: Request, *, named: bool) -> list[str]:
    """The patterns, the tensors if they are named, and the candidates of which there is no row, nor a reason why."""
    layers = {row["layer"] for row in session.rows} | {one.layer for one in session.unmeasured}
    roles = {row["role"] for row in session.rows} | {one.role for one in session.unmeasured}
    tried = {row.get("candidate") for row in session.rows} | {one.candidate for one in session.unmeasured}
    patterns = [p for p in request.layers or () if not any(re.fullmatch(p, layer) for layer in layers)]
    return [
        *(f"layers={pattern!r}" for pattern in patterns),
        *(f"tensors={tensor!r}" for tensor in request.tensors if named and tensor not in roles),
        *(f"whatif={candidate}" for candidate in map(str, request.candidates) if candidate not in tried),
    ]


def _check_layers(compiled: Any, request: Request) -> None:
    """Raises OptionError for a pattern that no module of a model matches."""
    if not isinstance(compiled, nn.Module) or request.layers is None:
        return
    names = [clean_path(name) for name, _ in unwrapped(compiled).named_modules()]
    for pattern in request.layers:
        if not any(re.fullmatch(pattern, name) for name in names):
            hint = did_you_mean(pattern, [name for name in names if name]) or ":"
            raise OptionError(
                f"layers={pattern!r} matches the name of no module{hint} a pattern matches the whole of a name such as "
                f"{next((name for name in reversed(names) if name), '')!r}"
            )
