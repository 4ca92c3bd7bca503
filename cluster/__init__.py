"""What every Tandem process shares: configuration, identity, hashing, membership, RPC security, telemetry, errors."""

import os

# gRPC writes lines of its own into logs that are JSON otherwise, and reads this when it is loaded: after this package.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
