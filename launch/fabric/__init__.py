"""Weight-sync routes at shard level: which GPU sends which bytes to which GPU, over which NIC, and the time. Pure.

    shards     bytes of each training shard that each rollout worker needs
    gpu_order  the GPU of its node for each engine rank, so that traffic stays on its rail
    lanes      shards and workers on nodes: senders, receivers, and the pieces that a node receives
    routes     direct, chain, tree: edges with bytes, slots, hops and parents
    seated     the traffic of a placed run: the GPU of each member that is still alive
    bounds     lower bounds for the time of any route
    communicators  number of communicators on a GPU, and their memory
    staging    buffers of a route on each GPU
    rounds     the order in which they are opened
    estimate   expected time in closed form, for the search
    simulate   time chunk by chunk, for the final plan
    paths      a route from node to node, as trees, for `megatron-rl sync plan`
    choose     comparison of the three routes, and the choice
"""
