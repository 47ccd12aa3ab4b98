"""Data loading on each rank: the sampler, the loader and the copy to the device."""
