"""KV below the pool: host memory, then a disk, for full verified blocks that the pool had to evict.

    pool evicts ──put──> HostTier ──evicts──> DiskTier
    prompt matches <──get── either, verified, into a block that the pool owns

A key is the block's chained hash, seeded by tenant scope, model and layout: tenants cannot meet here either.
A tier is a cache: whatever goes wrong with it is a miss, never a wrong block and never a failed request.
"""
