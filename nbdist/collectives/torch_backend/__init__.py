"""The backend "nbdist" of torch.distributed."""
