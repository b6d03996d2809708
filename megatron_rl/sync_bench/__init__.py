"""Weight syncs without a trainer and without an engine: the real sender, receiver and coordinator over plain processes,
to be measured. `python -m megatron_rl.sync_bench` is what `megatron-rl sync bench` runs.

    members    processes that take calls over pipes, on this machine or in network namespaces of it
    rank       a training rank: Megatron's layout over plain tensors, and the real `WeightSender`
    worker     a rollout worker: vLLM's own model, unrun, and the real `InPlaceTransferEngine`
    world      both, with handles for the real `SyncCoordinator`
    rates      what one process copies and digests, alone
    lane_probe what one lane carries, alone
    compare    measured beside predicted, edge by edge
    local      the sync of a configuration on this machine
"""
