"""The callbacks for other trainers, by the examples of the docs: training in two parts has the bits of one run."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import fxquant
from fxquant import FxQuantError, FxQuantWarning, OptionError

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def example(name: str, needs: str) -> ModuleType:
    pytest.importorskip(needs, reason=f"{needs} is not installed")
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # Dynamo imports it by its name
    spec.loader.exec_module(module)
    return module


def equal(folders: list[Path]) -> bool:
    whole, parts = (torch.load(folder / "result.pt") for folder in folders)
    same = [torch.equal(value, parts["model"][name]) for name, value in whole["model"].items()]
    return whole["losses"] == parts["losses"] and all(same)


@pytest.mark.slow
def test_torchtitan_blocks_resume_to_the_bit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    example("torchtitan_blocks", "torchtitan").main(["--output", str(tmp_path), "--layers", "2"])
    printed = capfd.readouterr().out
    assert "layers.{0..1}.feed_forward.w2 " in printed and "bits of the whole one: True" in printed


@pytest.mark.slow
def test_lora_adapters_are_trained_beside_quantized_weights(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    run = example("hugging_face", "transformers").main
    short = ["--inner", "aot_eager", "--layers", "1", "--steps", "2", "--total", "2"]
    run([*short, "--recipe", "mxfp8", "--lora", "--output", str(tmp_path)])
    result = torch.load(tmp_path / "result.pt")
    adapters = [value for name, value in result["model"].items() if "lora_B" in name]
    assert len(result["losses"]) == 2 and adapters and all(value.any() for value in adapters)  # which begin at zero


RESUME = """
import json, sys, torch, hugging_face
for arguments in json.loads(sys.argv[1]):
    hugging_face.main(arguments)
    torch.compiler.reset()
"""


@pytest.mark.slow
def test_hugging_face_trainer_resumes_to_the_bit_in_another_process(tmp_path: Path) -> None:
    run = example("hugging_face", "transformers").main
    folders, resumed = [], []
    for recipe in ("delayed_scaling", "nvfp4"):
        whole, parts = tmp_path / recipe / "whole", tmp_path / recipe / "parts"
        same = ["--inner", "aot_eager", "--recipe", recipe, "--layers", "1", "--total", "6", "--output"]
        run([*same, str(whole), "--steps", "6"])
        torch._dynamo.reset()
        if recipe == "delayed_scaling":
            run([*same, str(parts), "--steps", "4"])
            torch._dynamo.reset()
        else:  # a run that ends without a word leaves what it had written before
            shutil.copytree(whole / "checkpoint-4", parts / "checkpoint-4")
        folders.append([whole, parts])
        resumed.append([*same, str(parts), "--steps", "6", "--resume"])
    command = [sys.executable, "-c", RESUME, json.dumps(resumed)]  # one process, which imports all of it once
    subprocess.run(command, check=True, capture_output=True, cwd=EXAMPLES)
    for whole, parts in folders:
        assert equal([whole, parts])
        assert (parts / "checkpoint-4" / "quantization_state.pt").is_file()
        log = json.loads((parts / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
        assert [entry["quantized_flops"] > 0.5 for entry in log if "quantized_flops" in entry] == [True]


def test_hugging_face_callback_refuses_what_would_be_silent(tmp_path: Path) -> None:
    example("hugging_face", "transformers")
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_callback import TrainerControl, TrainerState

    from fxquant.integrations.transformers import QuantizationCallback

    model = nn.Linear(32, 32)
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(OptionError, match="recipe, which is missing"):
        QuantizationCallback(save="least")
    with pytest.raises(OptionError, match="fxquant has compiled no part of Linear"):
        Trainer(model=model, args=arguments, callbacks=[QuantizationCallback()])
    compiled_twice = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], torch_compile=True)
    with pytest.raises(OptionError, match="compiles the model a second time"):
        Trainer(model=model, args=compiled_twice, callbacks=[QuantizationCallback("mxfp8")])

    callback = QuantizationCallback("delayed_scaling", inner="aot_eager")
    state = TrainerState(global_step=4, stateful_callbacks=[callback])
    state.stateful_callbacks[type(callback).__name__]["attributes"]["run"] = "another"
    with pytest.raises(OptionError, match=r"step 4 has no quantization state: no quantization_state\.pt of this run"):
        callback.on_train_begin(arguments, state, TrainerControl(), model)
    with pytest.warns(FxQuantWarning, match="written without QuantizationCallback"):
        callback.on_train_begin(arguments, TrainerState(global_step=4), TrainerControl(), model)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed_scaling", "nvfp4"])
def test_lightning_trainer_resumes_to_the_bit(recipe: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = example("lightning_trainer", "lightning").main
    run(["--inner", "aot_eager", "--device", "cpu", "--recipe", recipe, "--output", str(tmp_path)])
    printed = capfd.readouterr().out
    assert "100.0% of matmul FLOPs" in printed and "bits of the whole one: True" in printed


def test_lightning_callback_refuses_what_would_be_silent() -> None:
    module = example("lightning_trainer", "lightning")
    from fxquant.integrations.lightning import QuantizationCallback

    with pytest.raises(OptionError, match="has no module 'modle'"):
        QuantizationCallback("mxfp8", modules="modle").setup(None, module.Regression(), "fit")
    with pytest.raises(OptionError, match="no module with parameters"):
        QuantizationCallback("mxfp8").setup(None, nn.Sequential(nn.ReLU()), "fit")


@pytest.mark.slow
def test_accelerate_checkpoints_hold_the_state(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = example("accelerate_loop", "accelerate").main
    run(["--inner", "aot_eager", "--cpu", "--output", str(tmp_path)])
    printed = capfd.readouterr().out
    assert "100.0% of matmul FLOPs" in printed and "bits of the whole one: True" in printed


def test_each_recipe_is_a_backend_by_name() -> None:
    for recipe in fxquant.recipes.RECIPES:
        assert f"fxquant-{recipe}" in torch.compiler.list_backends()
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    compiled = torch.compile(model, backend="fxquant-mxfp8", options={"inner": "aot_eager"})
    assert fxquant.report(compiled).coverage == 0
    compiled(torch.randn(32, 32)).sum().backward()
    assert fxquant.report(compiled).recipe == "mxfp8" and fxquant.report(model).coverage == 1
    with pytest.raises(OptionError, match="'fxquant-mxfp8' names its recipe"):
        fxquant.backend.mxfp8.backend(options={"recipe": "nvfp4"})


@pytest.mark.parametrize("package", ["transformers", "lightning"])
def test_wrong_arguments_are_told_when_the_callback_is_made(package: str) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    callback = importlib.import_module(f"fxquant.integrations.{package}").QuantizationCallback
    for call, said in (
        (lambda: callback("mxpf8"), "did you mean 'mxfp8'"),
        (lambda: callback(3), "a recipe is a Recipe or one of"),
        (lambda: callback("mxfp8", iner="aot_eager"), "did you mean 'inner'"),
        (lambda: callback("mxfp8", inner="tvm"), "inner must be"),
        (lambda: callback("mxfp8", "nvfp4"), "takes 1 argument by position"),
        (lambda: callback("mxfp8", modules=3), "modules"),
    ):
        with pytest.raises(FxQuantError, match=said):
            call()
    with pytest.raises(AttributeError, match=r"integrations\.transformers and .*lightning have a QuantizationCallback"):
        _ = importlib.import_module("fxquant.integrations").QuantizationCallback
