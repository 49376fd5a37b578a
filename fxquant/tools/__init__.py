"""Questions about a model: `explain` before it runs, `measure` for errors."""
