"""What every Tandem process shares: configuration, identity, hashing, membership, RPC security, telemetry, errors."""

import os

# gRPC writes lines of its own into logs that are JSON otherwise, and reads this when it is loaded: after this package.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Its fork handlers may end a child by a signal before it becomes the program that was asked for, and uvloop forks.
# Nobody here forks and goes on.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
