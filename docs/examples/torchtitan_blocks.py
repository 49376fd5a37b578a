"""Trains torchtitan's debug Llama block by block under a recipe, saves a distributed checkpoint, and resumes it.

python docs/examples/torchtitan_blocks.py --output out

torchtitan's trainer needs a GPU for its attention. Its model, `parallelize_llama`, optimizer and what it gives to
distributed checkpoints run here on any device, with its scaled-dot-product attention in the blocks.
"""

import argparse
import os

import torch
import torch.distributed.checkpoint as dcp
import torchtitan.tools.utils as titan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
titan.device_type, titan.device_module = DEVICE, getattr(torch, DEVICE)  # before other modules of torchtitan read them

from torchtitan.components.checkpointer import ModelWrapper  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention, SDPBackend  # noqa: E402
from torchtitan.models.llama3 import Llama3Model, llama3_configs, parallelize_llama  # noqa: E402

import fxquant  # noqa: E402

CHECKPOINTS = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}


def parallel_model(args: argparse.Namespace) -> torch.nn.Module:
    """Returns a new model whose blocks torchtitan has compiled by the name of a backend."""
    config = llama3_configs["debugmodel"]("flex")
    config.layers = config.layers[: args.layers]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    ScaledDotProductAttention.sdpa_backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with torch.device("meta"):
        model = Llama3Model(config)
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, world_size=1)
    dims.build_mesh()
    model = parallelize_llama(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=ParallelismConfig(),
        compile_config=CompileConfig(enable=True, components=["model"], backend=f"fxquant-{args.recipe}"),
        ac_config=CHECKPOINTS[args.checkpoint],
        dump_folder=args.output,
    )
    model.to_empty(device=DEVICE)
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states()
    return model


def trained(args: argparse.Namespace, steps: range) -> torch.nn.Module:
    """Returns the model after `steps`, which begin at the checkpoint if not at 0."""
    model = parallel_model(args)
    optimizer = default_adamw(lr=1e-3).build(model_parts=[model])
    state = {"optimizer": optimizer, "quantization": fxquant.QuantizationState(model)}
    if steps.start:
        dcp.load({"model": ModelWrapper([model]), **state}, checkpoint_id=args.output)
    for step in steps:
        tokens = torch.randint(0, 2048, (2, 64), generator=torch.Generator().manual_seed(step)).to(DEVICE)
        logits = model(tokens, positions=torch.arange(64, device=DEVICE).expand(2, 64))
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save({"model": ModelWrapper([model]), **state}, checkpoint_id=args.output)
    return model


def main(argv: list[str] | None = None) -> None:
    """Trains at once, and in two parts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", default="torchtitan_out", help="the folder of the checkpoint")
    parser.add_argument("--recipe", default="delayed_scaling")
    parser.add_argument("--checkpoint", default="selective", choices=CHECKPOINTS, help="torchtitan's recomputation")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args(argv)
    single = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}
    os.environ.update({name: value for name, value in single.items() if name not in os.environ})
    torch.distributed.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    try:
        whole = trained(args, range(args.steps))
        trained(args, range(args.steps // 2))
        resumed = trained(args, range(args.steps // 2, args.steps))
        print(fxquant.report(resumed))
        same = [torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True)]
        print("the resumed run has the bits of the whole one:", all(same))
    finally:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
