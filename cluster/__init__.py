"""What every Tandem process shares: configuration, identity, hashing, membership, RPC security, telemetry, errors."""
