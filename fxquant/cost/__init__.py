"""Estimates of time from measured rates: `estimate` for linear layers and experts, `attention` for attention."""
