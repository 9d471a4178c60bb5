"""scripts/gpu/side_by_side.sh: tasks in copies of the checkout, with their own GPUs, modules and patches."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu" / "side_by_side.sh"
PATCH = "--- a/text\n+++ b/text\n@@ -1 +1 @@\n-before\n+after\n"


def call(script: Path, *arguments: str | Path, programs: Path | None = None) -> tuple[int, str]:
    path = os.environ["PATH"] if programs is None else f"{programs}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path}
    done = subprocess.run([script, *arguments], capture_output=True, text=True, timeout=120, env=env)
    return done.returncode, done.stdout + done.stderr


def with_gpus(folder: Path, count: int) -> Path:
    """A folder with an nvidia-smi that lists so many GPUs."""
    folder.mkdir()
    smi = folder / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\nseq {count}\n")
    smi.chmod(0o755)
    return folder


def test_each_task_has_its_own_copy_gpus_and_results(tmp_path: Path) -> None:
    programs = with_gpus(tmp_path / "programs", 4)
    checkout, tasks, out = tmp_path / "checkout", tmp_path / "tasks", tmp_path / "out"
    script = checkout / "scripts" / "gpu" / SCRIPT.name
    script.parent.mkdir(parents=True)
    shutil.copy(SCRIPT, script)
    (checkout / "text").write_text("before\n")
    for name, lines in {
        "patched": 'cat text; echo "$CUDA_VISIBLE_DEVICES $EXL_COMMIT"; echo more > "$OUT/file"',
        "plain": "cat text; exit 3",
        "endless": "sleep 100",
    }.items():
        (tasks / name).mkdir(parents=True)
        (tasks / name / "run.sh").write_text(lines)
    (tasks / "patched" / "change.patch").write_text(PATCH)
    (tasks / "patched" / "commit").write_text("1234abcd")

    assert call(script, "pack", tasks, "patched", "plain", "endless")[0] == 0
    code, text = call(script, "run", out, "5", "patched:0,1", "plain:2", "endless:3", programs=programs)
    assert code == 1, text
    assert (out / "patched.txt").read_text() == "after\n0,1 1234abcd\n"
    assert (out / "plain.txt").read_text() == "before\n"
    assert (checkout / "text").read_text() == "before\n"
    assert sorted(text.splitlines()[-3:]) == [
        "endless: exit code 124",
        "patched: exit code 0",
        "plain: exit code 3",
    ]
    with tarfile.open(out / "patched.tgz") as archive:
        assert "./file" in archive.getnames()


def test_a_machine_without_gpus_runs_nothing(tmp_path: Path) -> None:
    programs = with_gpus(tmp_path / "programs", 0)
    assert call(SCRIPT, "run", tmp_path / "out", "5", "plain:0", programs=programs) == (1, "nvidia-smi lists no GPU\n")


def test_a_task_without_a_command_is_not_packed(tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    assert call(SCRIPT, "pack", tmp_path, "task") == (1, f"{tmp_path}/task has no run.sh\n")
