"""`exllamav2.conversion`: what its scripts use of the converter; `python -m exl_core.convert` converts models here."""
