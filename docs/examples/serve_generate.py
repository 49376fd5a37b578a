"""Serves a Hugging Face model by `generate` with a static cache: W8A8 in FP8, and W4A16 in NVFP4.

On a GPU each step runs as a CUDA graph (`reduce-overhead`), and weights are quantized once.

python docs/examples/serve_generate.py --tokens 32
"""

import argparse
import time

import torch
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

import fxquant


def main(argv: list[str] | None = None) -> None:
    """Generates under each recipe, and prints the time of a token."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=["high_precision", "rowwise", "weight_only_nvfp4"])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--width", type=int, default=0, help="0 for 4096 on a GPU, 64 on a CPU")
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    device, width = ("cuda", args.width or 4096) if cuda else ("cpu", args.width or 64)

    config = LlamaConfig(
        vocab_size=512, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(device, torch.bfloat16).eval()
    prompt = torch.randint(1, 512, (1, 16), device=device)
    for recipe in args.recipes:
        torch.compiler.reset()
        settings = {"mode": "reduce-overhead"} if cuda else {"inner": "aot_eager"}
        backend = fxquant.Backend(recipe, model=model, cache_weights=True, **settings)
        compilation = CompileConfig(backend=backend, mode=None, fullgraph=False)
        compilation._compile_all_devices = True  # transformers compiles on GPUs only, unless it is told so
        options = {
            "max_new_tokens": args.tokens, "do_sample": False, "cache_implementation": "static",
            "compile_config": compilation, "prefill_chunk_size": 16,
        }  # fmt: skip
        model.generate(prompt, **options)  # compiles
        start = time.perf_counter()
        tokens = model.generate(prompt, **options)
        taken = (time.perf_counter() - start) / (tokens.shape[1] - prompt.shape[1])
        print(f"{recipe}: {taken * 1e3:.1f} ms a token, {tokens[0, 16:24].tolist()} ..", flush=True)
    print(fxquant.report(model))


if __name__ == "__main__":
    main()
