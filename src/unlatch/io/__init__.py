"""What a run leaves on disk: its folder, metrics, versions and checkpoints. Knows nothing of how training works."""
