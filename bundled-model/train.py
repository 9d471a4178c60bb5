"""Train the bundled model and its draft sibling in one run, bounded by time.

    python train.py TOKENIZER_DIR OUT_DIR --seconds 360 --workers 13

Shards are made by other processes meanwhile and taken in as they appear. The draft learns from the same batches, mostly
from the big model's own distribution. The schedule follows the clock, so the run ends when it should on any machine.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch._dynamo
from export import write_folder
from model import BIG, DRAFT, Llama
from safetensors.torch import load_file
from sampling import show
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

BOS = 1


class TokenPool:
    """All training tokens seen so far on the device, and the places where documents begin."""

    def __init__(self, folder: Path, device: torch.device, length: int) -> None:
        self._folder, self._device, self._length = folder, device, length
        self._taken: set[Path] = set()
        self._tokens = torch.empty(0, dtype=torch.int16, device=device)
        self._starts = torch.empty(0, dtype=torch.int64, device=device)

    def refresh(self) -> int:
        """Take in new shards; return the number of tokens held."""
        new = [p for p in sorted(self._folder.glob("train-*.npy")) if p not in self._taken]
        if new:
            self._taken.update(new)
            parts = [torch.from_numpy(np.load(p).astype(np.int16)).to(self._device) for p in new]
            self._tokens = torch.cat([self._tokens, *parts])
            self._starts = (self._tokens[: -self._length - 1] == BOS).nonzero().flatten()
        return self._tokens.numel()

    def batch(self, rows: int) -> Tensor:
        """Return rows [rows, length + 1] that each begin with a document."""
        starts = self._starts[torch.randint(self._starts.numel(), (rows,), device=self._device)]
        return self._tokens[starts[:, None] + torch.arange(self._length + 1, device=self._device)].long()


def losses(big: Llama, draft: Llama, rows: Tensor, teaching: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the big model's cross entropy, the draft's, and the draft's objective."""
    inputs, targets = rows[:, :-1], rows[:, 1:].reshape(-1)
    big_logits = big(inputs).flatten(0, 1)
    draft_logits = draft(inputs).flatten(0, 1)
    big_loss = functional.cross_entropy(big_logits.float(), targets)
    draft_loss = functional.cross_entropy(draft_logits.float(), targets)
    teacher = big_logits.detach().float().log_softmax(-1)
    student = draft_logits.float().log_softmax(-1)
    divergence = (teacher.exp() * (teacher - student)).sum(-1).mean()
    return big_loss, draft_loss, (1 - teaching) * draft_loss + teaching * divergence


@torch.no_grad()
def held_out_loss(model: Llama, file: Path, device: torch.device, rows: int = 256, length: int = 512) -> float:
    """Return the mean cross entropy (nats a token) of a held-out shard's rows, each from a document's start."""
    tokens = torch.from_numpy(np.load(file).astype(np.int64)).to(device)
    starts = (tokens[: -length - 1] == BOS).nonzero().flatten()
    starts = starts[torch.linspace(0, starts.numel() - 1, rows, device=device).long()]
    batch = tokens[starts[:, None] + torch.arange(length + 1, device=device)]
    total = 0.0
    for chunk in torch.split(batch, 32):
        logits = model(chunk[:, :-1]).float()
        total += float(functional.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].reshape(-1), reduction="sum"))
    return total / (rows * length)


def optimizer(model: Llama, rate: float, fused: bool) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices only."""
    decayed = [p for p in model.parameters() if p.dim() == 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=fused)


def schedule(progress: float, step: int, warmup: int) -> float:
    """Return the factor on the learning rate: linear warm-up by steps, cosine to 1 % by time."""
    return min(1.0, (step + 1) / warmup) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def wait_for_shards(pool: TokenPool, maker: subprocess.Popen[bytes], tokens: int) -> None:
    """Wait until this many tokens are there, or the maker has ended."""
    while pool.refresh() < tokens and maker.poll() is None:
        time.sleep(1)
    if pool.refresh() == 0:
        raise SystemExit("no shards were made: see the output of shards.py above")


def fit(a: argparse.Namespace, pool: TokenPool, big: Llama, draft: Llama, device: torch.device) -> None:
    """Train both models for `a.seconds`."""
    cuda = device.type == "cuda"
    step_losses = torch.compile(losses) if a.compile else losses
    optimizers = [(optimizer(big, a.rate, cuda), a.rate), (optimizer(draft, a.draft_rate, cuda), a.draft_rate)]
    begin, last, step, seen, saved = time.time(), time.time(), 0, 0, False
    while (progress := (time.time() - begin) / a.seconds) < 1.0:
        if step == 2:  # compilation and first launches do not count against the schedule
            a.seconds, begin = max(1.0, a.seconds - (time.time() - begin)), time.time()
        factor = schedule(progress, step, a.warmup)
        for opt, rate in optimizers:
            for group in opt.param_groups:
                group["lr"] = rate * factor
        teaching = torch.tensor(min(0.8, 0.8 * progress / 0.2), device=device)
        rows = pool.batch(a.rows)
        with torch.autocast(device.type, torch.bfloat16):
            big_loss, draft_loss, objective = step_losses(big, draft, rows, teaching)
        (big_loss + objective).backward()  # type: ignore[no-untyped-call]
        for model, (opt, _) in zip((big, draft), optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
        step += 1
        seen += a.rows * a.length
        if step % a.every == 0:
            held = pool.refresh()
            speed = a.every * a.rows * a.length / (time.time() - last) / 1e6
            last = time.time()
            losses_now = f"loss {big_loss.item():.4f} draft {draft_loss.item():.4f}"
            tokens = f"seen {seen / 1e6:.0f}M held {held / 1e6:.0f}M"
            print(f"step {step} {progress:.2f} {tokens} {losses_now} {speed:.2f}M tok/s", flush=True)
        if not saved and progress > 0.6:
            save(a.out, big, draft)
            saved = True


def save(out: Path, big: Llama, draft: Llama) -> None:
    """Write both folders."""
    write_folder(big, out / "big")
    write_folder(draft, out / "draft")


def read_folder(model: Llama, folder: Path) -> None:
    """Load the weights that `write_folder` wrote."""
    state: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        state |= load_file(file)
    model.load_state_dict(state)


def main() -> None:
    """Make the corpus, train, save, measure, print samples."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shards-dir", type=Path, default=Path("shards"))
    parser.add_argument("--seconds", type=float, default=360)
    parser.add_argument("--workers", type=int, default=13)
    parser.add_argument("--shards", type=int, default=200)
    parser.add_argument("--shard-size", type=int, default=2_500_000)
    parser.add_argument("--start-with", type=int, default=30_000_000, help="tokens to wait for before training")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--draft-rate", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=150, help="steps of linear warm-up")
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--init", type=Path, help="go on from the `big` and `draft` folders of an earlier run")
    parser.add_argument("--kinds", nargs="*", default=[], help="kinds of documents to draw from, e.g. chat chat story")
    a = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(1)
    torch._dynamo.config.suppress_errors = True  # without a working compiler: eager, slower
    began = time.time()
    here = Path(__file__).parent
    options = {"--workers": a.workers, "--shards": a.shards, "--size": a.shard_size}
    command = [sys.executable, here / "shards.py", a.tokenizer, a.shards_dir, *(x for o in options.items() for x in o)]
    maker = subprocess.Popen([*map(str, command), "--kinds", *a.kinds])
    try:
        tokenizer = Tokenizer.from_file(str(a.tokenizer / "tokenizer.json"))
        big, draft = Llama(BIG).to(device), Llama(DRAFT).to(device)
        for label, model in (("big", big), ("draft", draft)):
            if a.init:
                read_folder(model, a.init / label)
            print(label, f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters", flush=True)
        pool = TokenPool(a.shards_dir, device, a.length)
        wait_for_shards(pool, maker, a.start_with)
        print(f"training begins after {time.time() - began:.0f} s", flush=True)
        fit(a, pool, big, draft, device)
        save(a.out, big, draft)
        print(f"saved after {time.time() - began:.0f} s", flush=True)
    finally:
        maker.terminate()
    for split in ("seed", "combo"):
        for label, model in (("big", big), ("draft", draft)):
            loss = held_out_loss(model, a.shards_dir / f"{split}-0000.npy", device)
            print(f"held-out {split} {label}: {loss:.4f} nats a token", flush=True)
    samples = show(big, tokenizer) + "\n=== draft ===\n" + show(draft, tokenizer, limit=120)
    (a.out / "samples.txt").write_text(samples)
    print(samples)


if __name__ == "__main__":
    main()
