"""The bars of the CUDA backend's issue, and the peers on the same kind of card.

The peers were measured in other runs on an H200: exllamav2 0.3.2 (its forward loop; for the small model its dynamic
generator) and exllamav3 (its generator). Shares are of the read roof of our own run. Tokens a second are bars for an
H200; an H100 has one of its own, a share.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BARS", "PREFILL_BAR", "Bar"]


@dataclass(frozen=True)
class Bar:
    """Tokens a second, and shares of the read roof where the bar is one."""

    peers: dict[str, float]
    target: float
    target_share: float | None = None
    stretch: float | None = None
    stretch_share: float | None = None
    h100: tuple[float, float] | None = None  # target and stretch target there

    def keys(self, gpu: str, tok_s: float, share: float | None = None) -> dict[str, object]:
        """Return the fields of a line for a speed measured on a GPU of that name; `share` of the roof, 0 to 1."""
        if "H100" in gpu and self.h100 is not None and share is not None:
            target, stretch = self.h100
            return {"target_share": target, "stretch_share": stretch, "target_met": share >= target}
        if "H200" not in gpu:
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


def _peers(exllamav2: float | None = None, exllamav3: float | None = None) -> dict[str, float]:
    both = {"exllamav2 0.3.2": exllamav2, "exllamav3 1.6.5": exllamav3}
    return {name: found for name, found in both.items() if found is not None}


#: (model shape, bits, cache, tokens of context, sequences)
BARS: dict[tuple[str, str, str, int, int], Bar] = {
    ("8b", "4.0", "fp16", 256, 1): Bar(_peers(167, 141), 620, 0.55, 790, 0.70, (0.68, 0.85)),
    ("8b", "3.0", "fp16", 256, 1): Bar(_peers(106), 590, 0.42, None, 0.58),
    ("8b", "gptq4", "fp16", 256, 1): Bar(_peers(139), 600, 0.54, None, 0.70),
    ("8b", "4.0", "fp16", 16384, 1): Bar(_peers(58), 370, 0.50, None, 0.65),
    ("8b", "4.0", "q4", 16384, 1): Bar(_peers(52), 445, 0.45, None, 0.62),
    ("8b", "4.0", "fp16", 256, 8): Bar(_peers(637, 1051), 4000, stretch=5500),
    ("8b", "4.0", "fp16", 256, 32): Bar(_peers(876, 1857), 10000, stretch=16000),
    ("8b", "4.0", "fp16", 256, 64): Bar(_peers(1939, 1781), 15000, stretch=25000),
    ("tinyllama", "4.0", "fp16", 256, 1): Bar(_peers(263, 362), 1500, stretch=2600),
}

PREFILL_BAR = Bar(_peers(33700, 27200), 36000, stretch=43000)  # 8B, 4.0 bits, 2,048 tokens
