"""Weight-sync routes at shard level: who sends which bytes to whom, over which NIC, and how long that takes. Pure.

    shards     which bytes of each training shard each rollout worker needs
    gpu_order  which GPU of its node an engine's rank sits on, so that traffic stays on its rail
    lanes      shards and workers put on nodes: senders, receivers, the parts in which a node takes its bytes
    routes     direct, chain, tree: edges with bytes, slots, hops and parents
    seated     the same for members that were placed: who sits where, and who is still there
    bounds     times below which no route can be
    communicators  how many a GPU needs for a route, and their memory
    estimate   expected time in closed form (the search), `simulate` chunk by chunk (the final plan)
    paths      a route from node to node, as trees: what `megatron-rl sync plan` draws
    choose     all three beside each other, and the choice
"""
