"""Trains a small Llama by Hugging Face's Trainer under a recipe, stops it, and resumes it in another process.

python docs/examples/hugging_face.py --output out --steps 4
python docs/examples/hugging_face.py --output out --steps 8 --resume
python docs/examples/hugging_face.py --output tuned --lora
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import fxquant
from fxquant.integrations.transformers import QuantizationCallback


class Text(Dataset):
    """Sequences of tokens in which each follows from the one before."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(32) * (index % 7 + 1)) % 64
        return {"input_ids": tokens, "labels": tokens}


class StopAfter(TrainerCallback):
    """Stops a run before its end, as a queue of jobs does."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop |= state.global_step >= self.steps


def main(argv: list[str] | None = None) -> None:
    """Trains until the run stops, and writes losses and weights."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", default="hugging_face_out", help="the folder of checkpoints")
    parser.add_argument("--recipe", default="delayed_scaling")
    parser.add_argument("--steps", type=int, default=8, help="steps until the run stops")
    parser.add_argument("--total", type=int, default=8, help="steps that the learning rate is planned for")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lora", action="store_true", help="train PEFT's LoRA adapters alone")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--inner", default="inductor", help="aot_eager begins sooner on a CPU")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=args.layers, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if args.lora:
        model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "v_proj", "down_proj"]))
    training = TrainingArguments(
        output_dir=args.output, max_steps=args.total, per_device_train_batch_size=8, save_steps=2, logging_steps=1,
        learning_rate=1e-3, lr_scheduler_type="constant", report_to=[], disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    callback = QuantizationCallback(args.recipe, inner=args.inner)
    trainer = Trainer(model=model, args=training, train_dataset=Text(), callbacks=[callback, StopAfter(args.steps)])
    trainer.train(resume_from_checkpoint=args.resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    torch.save({"losses": losses, "model": model.state_dict()}, f"{args.output}/result.pt")
    print("losses", *losses)
    print(fxquant.report(trainer.model).totals())


if __name__ == "__main__":
    main()
