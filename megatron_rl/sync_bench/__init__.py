"""Weight syncs for measurement, without a trainer and without an engine: the real sender, receiver and coordinator run
over plain processes. `megatron-rl sync bench` runs `python -m megatron_rl.sync_bench`.

    members    processes that take calls over pipes, on this machine or in its network namespaces
    agents     the same on the nodes of an allocation; `agent` runs on each of them
    rank       a training rank: Megatron's layout over plain tensors, and the real `WeightSender`
    worker     a rollout worker: vLLM's own model, not run, and the real `InPlaceTransferEngine`
    world      both, with handles for the real `SyncCoordinator`
    rates      the copy and digest rates of one process
    lane_probe the rate of one lane
    check      whether a plan can be measured
    sites      where its processes run
    measure    the measurement
    compare    measured and predicted times, edge by edge
    report     the output
"""
