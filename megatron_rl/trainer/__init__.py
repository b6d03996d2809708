"""The work of a training rank: Megatron-core's model, optimizer and checkpoints, without Ray."""

import warnings

# Five modules of Megatron print this on import. It is intended on a CPU; on a GPU the model's own spec requires them.
warnings.filterwarnings("ignore", message="(Transformer Engine and Apex are|Apex is) not installed")
