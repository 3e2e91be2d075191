"""relight: checkpoints of PyTorch training."""
