"""``python -m merestone``."""

from merestone.serve.cli import main

if __name__ == "__main__":
    main()
