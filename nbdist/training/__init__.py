"""Training on several ranks: data, files, learning rates, state and strategies."""
