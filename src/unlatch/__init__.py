"""Train ordinary PyTorch models with methods that open the locks of backpropagation."""
