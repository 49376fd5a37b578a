"""Trains a Hugging Face model in a loop of one's own, without Trainer, and resumes the run.

The model is compiled in place, so that its class, its keys and `save_pretrained` stay as they are. The loop accumulates
gradients, clips them, and has a schedule of the learning rate. A checkpoint holds the quantization's state beside those
of the model and the optimizer.

python docs/examples/hugging_face_loop.py --output out --steps 4
python docs/examples/hugging_face_loop.py --output out --steps 8 --resume
python docs/examples/hugging_face_loop.py --output out --model Qwen/Qwen3-0.6B --recipe current_scaling
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import fxquant

ACCUMULATED = 2
"""Batches in a step of the optimizer."""


def made(name: str | None, width: int, layers: int) -> PreTrainedModel:
    """Returns a pretrained model by its name, or a small Llama with new weights."""
    torch.manual_seed(0)
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False, bos_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batches(step: int, device: str) -> list[torch.Tensor]:
    """Returns the token sequences of a step: bytes of the standard library's source, the same in every run."""
    text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_bytes()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(device)
    starts = torch.randint(len(data) - 64, (ACCUMULATED, 4, 1), generator=torch.Generator().manual_seed(step))
    return list(data[starts.to(device) + torch.arange(64, device=device)])


def main(argv: list[str] | None = None) -> None:
    """Trains up to a step, saves a checkpoint and the model, and prints what was quantized."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", default="hugging_face_loop_out", help="the folder of the checkpoint and the model")
    parser.add_argument("--model", help="a pretrained model's name or folder, in place of a small one with new weights")
    parser.add_argument("--recipe", default="delayed_scaling")
    parser.add_argument("--width", type=int, default=64, help="of the small model")
    parser.add_argument("--layers", type=int, default=2, help="of the small model")
    parser.add_argument("--steps", type=int, default=8, help="the step at which the run stops")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--inner", default="inductor", help="aot_eager begins sooner on a CPU")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)

    model = made(args.model, args.width, args.layers).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    model.compile(backend=fxquant.Backend(args.recipe, model=model, inner=args.inner))
    states = {"model": model, "optimizer": optimizer, "schedule": schedule}
    states["quantization"] = fxquant.QuantizationState(model)
    begin = 0
    if args.resume:
        checkpoint = torch.load(folder / "checkpoint.pt", map_location=device, weights_only=True)
        begin = checkpoint.pop("step")
        for name, state in checkpoint.items():
            states[name].load_state_dict(state)

    for step in range(begin, args.steps):
        total = 0.0
        for tokens in batches(step, device):
            with torch.autocast(device, torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss / ACCUMULATED
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {total:.4f}, norm of the gradients {norm:.3f}", flush=True)

    saved = {name: state.state_dict() for name, state in states.items()}
    torch.save({"step": args.steps, **saved}, folder / "checkpoint.pt")
    model.save_pretrained(folder / "model")  # keys and files of the plain model
    print(fxquant.report(model))


if __name__ == "__main__":
    main()
