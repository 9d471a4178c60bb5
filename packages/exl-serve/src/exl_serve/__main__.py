"""`python -m exl_serve` is `exl serve`."""

from exl_serve.cli import app

if __name__ == "__main__":
    app(prog_name="exl serve")
