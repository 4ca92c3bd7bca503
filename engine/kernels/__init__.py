"""Operations by device: the plain reference, Triton for GPUs, native code for CPUs."""
