"""Moving KV between processes: the handoff protocol, its transports, its tiers."""
