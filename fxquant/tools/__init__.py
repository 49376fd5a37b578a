"""Questions about a model: `explain` before it runs, `measure` for errors, `uncaptured` for matmuls outside graphs."""
