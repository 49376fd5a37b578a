"""Callbacks for trainers of other packages, a file for each: `transformers` and `lightning`, which import theirs."""
