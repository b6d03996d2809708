"""What a training rank does: Megatron-core's model, optimizer and checkpoints, without Ray."""

import warnings

# Said by five modules of Megatron on import; on a CPU it is meant to be so, and on a GPU the model's own spec insists.
warnings.filterwarnings("ignore", message="(Transformer Engine and Apex are|Apex is) not installed")
