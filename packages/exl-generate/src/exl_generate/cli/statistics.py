"""Lines of statistics about a finished job."""

from __future__ import annotations

from typing import Any

__all__ = ["answer_line", "decode_speed", "generation_line"]


def decode_speed(last: dict[str, Any]) -> float:
    """Tokens per second after the first token, of a job's last result."""
    return (last["new_tokens"] - 1) / max(last["time_generate"], 1e-9) if last["new_tokens"] > 1 else 0.0


def generation_line(last: dict[str, Any]) -> str:
    """The line of `exl generate`: prompt, speed, reason of the end, seed."""
    return (
        f"[{last['prompt_tokens']} prompt tokens in {last['time_prefill']:.2f} s, {last['new_tokens']} new tokens in "
        f"{last['time_generate']:.2f} s, {decode_speed(last):.0f} tokens/s; ended by {last['eos_reason']}; "
        f"seed {last['job'].effective_seed}]"
    )


def answer_line(last: dict[str, Any]) -> str:
    """The line of `exl chat` after an answer: prompt tokens, how many of them were cached, new tokens, speed."""
    drafted = last.get("accepted_draft_tokens", 0) + last.get("rejected_draft_tokens", 0)
    return (
        f"[{last['prompt_tokens']} prompt tokens, {last['cached_tokens']} cached; {last['new_tokens']} tokens, "
        f"{decode_speed(last):.1f} tokens/s"
        + (f"; {last['accepted_draft_tokens']} of {drafted} drafted tokens accepted" if drafted else "")
        + ("; ended by max_tokens" if last["eos_reason"] == "max_new_tokens" else "")
        + "]"
    )
