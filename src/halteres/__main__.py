"""`python -m halteres`: the console script, where there is none on the path."""

from halteres.cli.main import main

if __name__ == "__main__":
    main()
