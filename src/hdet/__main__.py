"""``python -m hdet``: the command line."""

from hdet.cli import main

if __name__ == "__main__":
    main()
