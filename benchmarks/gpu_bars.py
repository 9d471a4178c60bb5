"""The bars of the CUDA backend and of the code for cards before Hopper, and the peers on the same kind of card.

The peers were measured in other runs on an H200: exllamav2 0.3.2 (its forward loop; for the small model its dynamic
generator) and exllamav3 (its generator). Shares are of the read roof of our own run. Tokens a second are bars for an
H200; an H100 has one of its own, a share, and so has an H100 that runs the code for sm_80.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ALONE_SHARES", "BARS", "PREFILL_BARS", "Bar", "alone_keys"]

SM_80 = ", code for sm_8"
"""Part of the name of a GPU that runs the code of cards from sm_80 to sm_89."""


@dataclass(frozen=True)
class Bar:
    """Tokens a second, and shares of the read roof where the bar is one."""

    peers: dict[str, float]
    target: float | None = None
    target_share: float | None = None
    stretch: float | None = None
    stretch_share: float | None = None
    h100: tuple[float, float] | None = None  # target and stretch target there
    sm80: float | None = None  # target of an H100 with the code for sm_80: a share up to 1, else tokens a second

    def keys(self, gpu: str, tok_s: float, share: float | None = None) -> dict[str, object]:
        """Return the fields of a line for a speed measured on a GPU of that name; `share` of the roof, 0 to 1."""
        if SM_80 in gpu:
            return self._of_sm80(tok_s, share) if "H100" in gpu else {}
        if "H100" in gpu and self.h100 is not None and share is not None:
            target, stretch = self.h100
            return {"target_share": target, "stretch_share": stretch, "target_met": share >= target}
        if "H200" not in gpu or self.target is None:
            return {}
        name = max(self.peers, key=lambda peer: self.peers[peer])
        line: dict[str, object] = {
            "ratio_vs_reference": tok_s / self.peers[name],
            "reference_name": f"{name}, {self.peers[name]:g} tok/s on an H200, another run",
            "target_tok_s": self.target,
            "stretch_tok_s": self.stretch,
            "target_met": tok_s >= self.target
            and (self.target_share is None or share is None or share >= self.target_share),
        }
        if self.target_share is not None:
            line |= {"target_share": self.target_share, "stretch_share": self.stretch_share}
        return line

    def _of_sm80(self, tok_s: float, share: float | None) -> dict[str, object]:
        if self.sm80 is None:
            return {}
        if self.sm80 > 1:
            return {"target_tok_s": self.sm80, "target_met": tok_s >= self.sm80}
        return {} if share is None else {"target_share": self.sm80, "target_met": share >= self.sm80}


def _peers(exllamav2: float | None = None, exllamav3: float | None = None) -> dict[str, float]:
    both = {"exllamav2 0.3.2": exllamav2, "exllamav3 1.6.5": exllamav3}
    return {name: found for name, found in both.items() if found is not None}


#: (model shape, bits, cache, tokens of context, sequences)
BARS: dict[tuple[str, str, str, int, int], Bar] = {
    ("8b", "4.0", "fp16", 256, 1): Bar(_peers(167, 141), 620, 0.55, 790, 0.70, (0.68, 0.85), 0.62),
    ("8b", "3.0", "fp16", 256, 1): Bar(_peers(106), 590, 0.42, None, 0.58, sm80=0.52),
    ("8b", "gptq4", "fp16", 256, 1): Bar(_peers(139), 600, 0.54, None, 0.70, sm80=0.62),
    ("8b", "4.0", "fp16", 16384, 1): Bar(_peers(58), 370, 0.50, None, 0.65, sm80=0.62),
    ("8b", "4.0", "q4", 16384, 1): Bar(_peers(52), 445, 0.45, None, 0.62, sm80=0.52),
    ("8b", "4.0", "fp16", 256, 8): Bar(_peers(637, 1051), 4000, stretch=5500, sm80=3000),
    ("8b", "4.0", "fp16", 256, 32): Bar(_peers(876, 1857), 10000, stretch=16000, sm80=7000),
    ("8b", "4.0", "fp16", 256, 64): Bar(_peers(1939, 1781), 15000, stretch=25000, sm80=9000),
    ("tinyllama", "4.0", "fp16", 256, 1): Bar(_peers(263, 362), 1500, stretch=2600),
}

#: of 8B at 4.0 bits, by tokens; for 8,192 only with the code for sm_80
PREFILL_BARS = {2048: Bar(_peers(33700, 27200), 36000, stretch=43000, sm80=33000), 8192: Bar({}, sm80=29000)}

ALONE_SHARES = {("gateup", "4"): 0.80, ("head", "4"): 0.80}
"""Shares of the read roof for one row by a matrix alone, by its name and bits, on an H100 with the code for sm_80."""


def alone_keys(gpu: str, shape: str, bits: str, rows: int, share: float) -> dict[str, object]:
    """Return the fields of a line for a matmul alone; `share` of the roof, 0 to 1."""
    target = ALONE_SHARES.get((shape, bits))
    if target is None or rows != 1 or SM_80 not in gpu or "H100" not in gpu:
        return {}
    return {"target_share": target, "target_met": share >= target}
