"""Estimates of time from measured rates: `estimate` of everything, by `gemms`, `casts` and `attention`."""
