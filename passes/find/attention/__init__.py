"""Attention: fused calls, attentions written out as products and a softmax, and flex attention."""
