"""The sizes of Llamas that are timed, and Hugging Face's models of such sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Llama:
    """Sizes of a Llama with new weights."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int = 32000

    def __str__(self) -> str:
        return f"Llama {self.layers} layers {self.hidden}/{self.ffn}"

    def model(self, length: int, **settings: Any) -> Any:
        """Returns the model for up to `length` tokens, with more settings of its configuration."""
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=self.hidden, intermediate_size=self.ffn, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, vocab_size=self.vocabulary,
            max_position_embeddings=length, attn_implementation="sdpa", **settings,
        )  # fmt: skip
        torch.manual_seed(0)
        return LlamaForCausalLM(config)
