"""The front: HTTP and gRPC, tokenising, placement, admission, streaming text."""
