"""Graph + Plan → runnable function: recompute, constrain, evaluate."""
