"""Running a model: weights, kernels, paged KV blocks, prefix cache, scheduler, sampling."""
