"""``python -m lab``: train, ablate, demo."""

from lab.cli import main

if __name__ == "__main__":
    main()
