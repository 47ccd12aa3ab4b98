"""Loading data on each rank: sampler, loader, transfer to the device."""
