"""The planner's models over measured points: predicted, measured, error (`megatron-rl plan accuracy`)."""
