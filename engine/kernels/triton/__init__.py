"""GPU kernels in Triton: one file an operation, each with its launcher and its contract.

They run on an NVIDIA GPU, and on the CPU through Triton's interpreter (`TRITON_INTERPRET=1`), which is how the tests
compare them with the reference. `engine.kernels.triton.compile_ahead` compiles each one for a GPU without having it.
"""
