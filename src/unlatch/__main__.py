"""`python -m unlatch`, and `torchrun -m unlatch`."""

from .cli import main

if __name__ == "__main__":
    main()
