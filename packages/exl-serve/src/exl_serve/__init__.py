"""An OpenAI-compatible HTTP server for EXL2, GPTQ and float models.

API workers (no torch) decode, validate and tokenize requests and write the answers; an engine process for each loaded
model runs them; a supervisor starts, watches and drains both. `exl serve` is the command.
"""

__version__ = "0.1.0"
