"""Weight-sync routes at shard level: who sends which bytes to whom, over which NIC, and how long that takes. Pure.

    shards     which bytes of each training shard each rollout worker needs
    gpu_order  which GPU of its node an engine's rank sits on, so that traffic stays on its rail
    lanes      shards and workers put on nodes: senders, receivers, the parts in which a node takes its bytes
    routes     direct, chain, tree: edges with bytes, slots, hops and parents
    bounds     times below which no route can be
    estimate   expected time in closed form (the search), `simulate` chunk by chunk (the final plan)
    choose     all three beside each other, and the choice
"""
