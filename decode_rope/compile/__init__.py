"""PyTorch operators for torch.compile and torch.export."""
