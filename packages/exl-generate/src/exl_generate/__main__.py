"""`python -m exl_generate` is the `exl` command."""

from exl_generate.cli import program

if __name__ == "__main__":
    program()
