"""What people ask of a model: `explain` before it runs, `measure` for errors, `uncaptured` for what no graph holds."""
