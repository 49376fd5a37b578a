"""Training by the Trainer of Hugging Face's transformers."""

from __future__ import annotations

import logging
import os
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from fxquant.backend.backend import Backend
from fxquant.backend.model import load_state_dict, report, state_dict
from fxquant.backend.options import Options, check_keywords
from fxquant.checks import checked
from fxquant.errors import ArgumentError, FxQuantWarning, OptionError, tell
from fxquant.files import write_whole
from fxquant.recipes import Recipe

log = logging.getLogger(__name__)


@checked(ArgumentError)
class QuantizationCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Has a Trainer train its model quantized, and keeps the quantization's state in the Trainer's checkpoints.

        Trainer(model=model, args=args, train_dataset=data, callbacks=[QuantizationCallback("mxfp8")])

    The model is compiled in place by ``fxquant.Backend(recipe, model=model, **options)``; without a recipe it has been
    compiled by fxquant before. Each checkpoint gets a file ``quantization_state.pt``, a file for each rank where there
    are several, and a run that is resumed takes it from there. The report's first line goes to this module's logger and
    into the Trainer's ``log_history`` after the first step.

    Raises RecipeError and OptionError at once, as `Backend` does, and OptionError for
    ``TrainingArguments(torch_compile=True)``, which would compile the model a second time.
    """

    def __init__(self, recipe: Recipe | str | None = None, **options: Any) -> None:
        if recipe is None and options:
            raise OptionError(f"{', '.join(options)}: options are those of a recipe, which is missing")
        if recipe is not None:
            check_keywords(options, "QuantizationCallback")
            Options.of({**{name: value for name, value in options.items() if name != "mode"}, "recipe": recipe})
        self.recipe = recipe
        self.options = options
        self.run = ""
        self._compiled: nn.Module | None = None
        self._reported = False

    def state(self) -> dict[str, Any]:
        """The name of the run for ``trainer_state.json``, so that a checkpoint takes no state of another run."""
        return {"args": {}, "attributes": {"run": self.run}}

    def on_init_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        if args.torch_compile:
            raise OptionError(
                "TrainingArguments(torch_compile=True) compiles the model a second time: QuantizationCallback does it"
            )
        self._compile(model)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        self._compile(model)  # from model_init
        saved = state.stateful_callbacks.get(_NAME, {}).get("attributes", {}).get("run")
        if state.global_step and saved:
            self.run = saved
            self._restore(args, state.global_step, model)
            return
        if state.global_step:
            tell(
                f"the checkpoint of step {state.global_step} was written without QuantizationCallback: the state of "
                "the quantization begins anew",
                FxQuantWarning,
            )
        self.run = _same_on_all_ranks(uuid.uuid4().hex)
        state.stateful_callbacks[_NAME] = self.state()

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        if self._reported:
            return
        self._reported = True
        done = report(model)
        log.info("%s", done.totals())
        state.log_history.append({"quantized_flops": done.coverage, "step": state.global_step})

    def on_save(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        folder = _folder(args, state.global_step)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / _file(args), partial(torch.save, {"run": self.run, "state": state_dict(model)}))

    def on_train_end(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        if args.load_best_model_at_end and state.best_global_step:
            self._restore(args, state.best_global_step, model)

    def _compile(self, model: nn.Module) -> None:
        if self.recipe is None:
            report(model)  # raises OptionError for a model that fxquant does not compile
        elif self._compiled is not model:
            model.compile(backend=Backend(self.recipe, model=model, **self.options))
            self._compiled = model

    def _restore(self, args: Any, step: int, model: nn.Module) -> None:
        """Takes the state from a checkpoint. Raises OptionError if it is not there."""
        folders = [_folder(args, step)]
        if isinstance(args.resume_from_checkpoint, str | os.PathLike):
            folders.insert(0, Path(args.resume_from_checkpoint))
        for path in (folder / _file(args) for folder in folders):
            if path.is_file():
                content = torch.load(path, weights_only=True)
                if content["run"] == self.run:
                    load_state_dict(model, content["state"])
                    return
        raise OptionError(
            f"the checkpoint of step {step} has no quantization state: no {_file(args)} of this run in "
            f"{' or '.join(map(str, folders))}. Give its folder as TrainingArguments(resume_from_checkpoint=..)"
        )


_NAME = QuantizationCallback.__name__
"""The key of the callback in the Trainer's state."""


def _same_on_all_ranks(name: str) -> str:
    """The name that rank 0 has given."""
    names = [name]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(names)
    return names[0]


def _folder(args: Any, step: int) -> Path:
    return Path(args.output_dir, f"checkpoint-{step}")


def _file(args: Any) -> str:
    rank = f"_{args.process_index}" if args.world_size > 1 else ""
    return f"quantization_state{rank}.pt"
