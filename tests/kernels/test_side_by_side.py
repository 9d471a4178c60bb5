"""scripts/gpu/side_by_side.sh: tasks in copies of the checkout, with their own GPUs, modules and patches."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu" / "side_by_side.sh"
PATCH = "--- a/text\n+++ b/text\n@@ -1 +1 @@\n-before\n+after\n"


def call(script: Path, *arguments: str | Path) -> tuple[int, str]:
    done = subprocess.run([script, *arguments], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_each_task_has_its_own_copy_gpus_and_results(tmp_path: Path) -> None:
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
    code, text = call(script, "run", out, "5", "patched:0,1", "plain:2", "endless:3")
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


def test_a_task_without_a_command_is_not_packed(tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    assert call(SCRIPT, "pack", tmp_path, "task") == (1, f"{tmp_path}/task has no run.sh\n")
