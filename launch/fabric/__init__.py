"""Weight-sync routes at shard level: who sends which bytes to whom, over which NIC, and how long that takes. Pure.

    shards     which bytes of each training shard each rollout worker needs
    gpu_order  which GPU of its node an engine's rank sits on, so that traffic stays on its rail
    lanes      shards and workers put on nodes: senders, receivers, the parts in which a node takes its bytes
    routes     direct, chain, tree: edges with bytes, slots, hops and parents
    seated     the same for placed members: the seat of each one, and which are still alive
    bounds     lower bounds of the time of any route
    communicators  how many a route needs on a GPU, and their memory
    estimate   expected time in closed form (the search), `simulate` chunk by chunk (the final plan)
    paths      a route from node to node, as trees: what `megatron-rl sync plan` draws
    choose     the three routes compared, and the choice
"""
