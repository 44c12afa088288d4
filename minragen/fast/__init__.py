"""The same results sooner: shared prefixes, no padding in updates, CUDA graphs, faster kernels."""
