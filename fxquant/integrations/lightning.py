"""Training by the Trainer of Lightning."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

from fxquant.backend.model import load_state_dict, report, state_dict
from fxquant.backend.options import Options
from fxquant.backend.repeated import compile_blocks
from fxquant.checks import checked
from fxquant.errors import ArgumentError, FxQuantWarning, OptionError, tell
from fxquant.recipes import Recipe

log = logging.getLogger(__name__)


@checked(ArgumentError)
class QuantizationCallback(Callback):  # type: ignore[misc]
    """Has a Trainer train the models in a LightningModule quantized, and keeps the state in the Trainer's checkpoints.

        Trainer(callbacks=[QuantizationCallback("mxfp8")])

    torch.compile takes no LightningModule, whose steps call its Trainer: `modules` names what is compiled in it, in
    place, as `fxquant.compile_blocks` does with these `options`; without names each direct child with parameters.
    The report's first line goes to this module's logger after the first step.

    Raises RecipeError and OptionError at once, as `compile_blocks` does, and OptionError where nothing is there to
    compile.
    """

    def __init__(self, recipe: Recipe | str, *, modules: Iterable[str] = (), **options: Any) -> None:
        Options.of({**options, "recipe": recipe})
        if not isinstance(modules, Iterable) or not all(isinstance(name, str) for name in modules):
            raise OptionError("modules are the names of modules in the LightningModule: modules=['encoder', 'head']")
        self.recipe = recipe
        self.modules = [modules] if isinstance(modules, str) else [*modules]
        self.options = options
        self._compiled: nn.Module | None = None
        self._reported = False

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        if self._compiled is pl_module:
            return
        children = dict(pl_module.named_modules())
        if missing := [name for name in self.modules if name not in children or not name]:
            raise OptionError(f"{type(pl_module).__name__} has no module {missing[0]!r}")
        chosen = [children[name] for name in self.modules]
        chosen = chosen or [child for child in pl_module.children() if any(True for _ in child.parameters())]
        if not chosen:
            raise OptionError(f"{type(pl_module).__name__} holds no module with parameters to compile: give modules=")
        compile_blocks(pl_module, self.recipe, chosen, options=self.options)
        self._compiled = pl_module

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, *_: Any) -> None:
        if not self._reported:
            self._reported = True
            log.info("%s", report(pl_module).totals())

    def on_save_checkpoint(self, trainer: Any, pl_module: nn.Module, checkpoint: dict[str, Any]) -> None:
        checkpoint[_KEY] = state_dict(pl_module)

    def on_load_checkpoint(self, trainer: Any, pl_module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
        if _KEY in checkpoint:
            load_state_dict(pl_module, checkpoint[_KEY])
        else:
            text = "the checkpoint was written without QuantizationCallback: the state of the quantization begins anew"
            tell(text, FxQuantWarning)


_KEY = "fxquant_quantization_state"
"""The entry of a checkpoint."""
