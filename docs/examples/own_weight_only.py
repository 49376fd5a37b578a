"""Serves a model whose weights alone are quantized, in a format of one's own; activations stay as they are.

The format is given by its parameters: MXFP4, blocks of 32 elements of E2M1 under a power of two, or 8-bit integers with
a scale a row. A rule gives it to the operands with the role `weight`, and everything else stays in high precision. The
weights are then stored quantized, in the model that generates and in a file.

python docs/examples/own_weight_only.py --tokens 32
"""

import argparse

import torch
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

import fxquant
from fxquant import BlockQuantizer, CustomRecipe, IdentityQuantizer, Rule, Rules

FORMATS = {
    "MXFP4": BlockQuantizer("e2m1", block=(1, 32), scale="e8m0"),
    "int8 rows": BlockQuantizer("int8", block=(1, 0), scale="float32"),
}


def weights_alone(quantizer: fxquant.Quantizer) -> CustomRecipe:
    """Returns a recipe for the weights of linear layers; roles that no rule matches stay in high precision."""
    keep = Rule(IdentityQuantizer(), name="lm_head")
    return CustomRecipe(qfactory=Rules([keep, Rule(quantizer, module_type="linear", tensor_type="weight")]))


def made(width: int, device: str) -> LlamaForCausalLM:
    """Returns a small Llama in bfloat16 that is not trained any more."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device, torch.bfloat16).eval().requires_grad_(False)


def generated(model: LlamaForCausalLM, recipe: CustomRecipe, prompt: torch.Tensor, tokens: int) -> torch.Tensor:
    """Returns the prompt and the tokens that follow it, from steps that are compiled with a static cache."""
    settings = {"mode": "reduce-overhead"} if prompt.is_cuda else {"inner": "aot_eager"}
    backend = fxquant.Backend(recipe, model=model, **settings)
    compilation = CompileConfig(backend=backend, mode=None, fullgraph=False)
    compilation._compile_all_devices = True  # transformers compiles on GPUs only, unless it is told so
    return model.generate(
        prompt,
        max_new_tokens=tokens,
        do_sample=False,
        cache_implementation="static",
        compile_config=compilation,
        prefill_chunk_size=16,
    )


def main(argv: list[str] | None = None) -> None:
    """Generates with weights in each format, and prints their bytes and what they change."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--width", type=int, default=0, help="0 for 4096 on a GPU, 64 on a CPU")
    parser.add_argument("--output", help="a file for the payloads and scales")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width = args.width or (4096 if device == "cuda" else 64)
    prompt = torch.randint(1, 512, (1, 16), generator=torch.Generator().manual_seed(0)).to(device)
    expected = made(width, device)(prompt).logits.float()
    for name in args.formats:
        torch.compiler.reset()
        recipe = weights_alone(FORMATS[name])
        model = fxquant.quantize_parameters(made(width, device), recipe)
        error = (model(prompt).logits.float() - expected).norm() / expected.norm()
        tokens = generated(model, recipe, prompt, args.tokens)
        print(f"{name}: error of the logits {error:.3f}, {tokens[0, 16:24].tolist()} ..", flush=True)
        print(fxquant.report(model))
        if args.output:
            torch.save(fxquant.payload_state_dict(model), args.output)


if __name__ == "__main__":
    main()
