"""`python -m vecsim`."""

from vecsim.cli import main

if __name__ == "__main__":
    main()
