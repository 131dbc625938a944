"""Many replays at once: axes, sweeps, Pareto fronts and capacity answers."""
