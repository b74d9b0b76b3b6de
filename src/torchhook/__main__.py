"""``python -m torchhook`` is the command line."""

from torchhook.cli import main

if __name__ == "__main__":
    main()
