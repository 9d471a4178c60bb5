"""Targets that the build script chooses, tested with stand-ins for nvcc and the driver; only rustc is needed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CRATE = Path(__file__).resolve().parents[2] / "rust" / "exl-cuda"
RUSTC = shutil.which("rustc")
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or RUSTC is None or COMPILER is None,
    reason="needs Linux, rustc and a C compiler",
)

NVCC = """#!/bin/sh
case "$1" in
  --version) echo "release 13.0, V0.0.0"; exit;;
  --list-gpu-arch) printf 'compute_%s\\n' 75 80 86 89 90 100 120; exit;;
esac
for word; do case "$word" in -gencode=* | -arch=*) arch=$word;; *.cu | *.ptx) source=$word;; esac; done
while [ "$1" != -o ]; do shift; done
echo "$arch" > "$2"
echo "${source##*/} $arch" >> "$NVCC_LOG"
"""
DRIVER = """
#include <stdlib.h>
static int compute(int index) { return atoi(getenv("STANDIN_COMPUTE") + 4 * index); }
int cuInit(unsigned flags) { return atoi(getenv("STANDIN_INIT")); }
int cuDeviceGetCount(int* count) { *count = atoi(getenv("STANDIN_COUNT")); return getenv("CUDA_VISIBLE_DEVICES") != 0; }
int cuDeviceGet(int* device, int index) { *device = index; return 0; }
int cuDeviceGetAttribute(int* value, int which, int device) {
  *value = which == 75 ? compute(device) / 10 : compute(device) % 10;
  return 0;
}
"""


class Crate:
    """A copy of the crate with two small kernels, and its compiled build script."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept = folder / "rust" / ".cuda-archs"
        self._crate = folder / "rust" / "exl-cuda"
        (self._crate / "kernels" / "some").mkdir(parents=True)
        (self._crate / "kernels" / "one.cu").write_text('#include "some/shared.cuh"\n')
        (self._crate / "kernels" / "some" / "two.cu").write_text("// two\n")
        (self._crate / "kernels" / "some" / "shared.cuh").write_text("// shared\n")
        self._toolkit = folder / "toolkit"
        (self._toolkit / "bin").mkdir(parents=True)
        (self._toolkit / "bin" / "nvcc").write_text(NVCC)
        (self._toolkit / "bin" / "nvcc").chmod(0o755)
        self._driver = folder / "driver"
        self._driver.mkdir()
        (folder / "driver.c").write_text(DRIVER)
        library = ["-shared", "-fPIC", "-o", str(self._driver / "libcuda.so.1"), str(folder / "driver.c")]
        subprocess.run([str(COMPILER), "-w", *library], check=True)
        script = ["--edition", "2024", str(CRATE / "build" / "main.rs"), "-o", str(folder / "script")]
        subprocess.run([str(RUSTC), *script], check=True)

    def build(
        self, archs: str | None = None, gpus: str | None = None, nvcc: bool = True, profile: str = "edit", init: int = 0
    ) -> subprocess.CompletedProcess[str]:
        """Run the build script with EXL_CUDA_ARCHS and GPUs of these compute capabilities (such as "8.9")."""
        out = self.folder / "target" / profile / "build" / "exl-cuda" / "out"
        out.mkdir(parents=True, exist_ok=True)
        env = {
            "PATH": "/usr/bin:/bin",
            "CARGO_MANIFEST_DIR": str(self._crate),
            "OUT_DIR": str(out),
            "NVCC_LOG": str(self.folder / "compiled"),
            "CUDA_VISIBLE_DEVICES": "",
        }
        if nvcc:
            env["EXL_CUDA_HOME"] = str(self._toolkit)
        if archs is not None:
            env["EXL_CUDA_ARCHS"] = archs
        if gpus is not None:
            computes = [f"{capability.replace('.', ''):>3}" for capability in gpus.split()]
            env |= {"LD_LIBRARY_PATH": str(self._driver), "STANDIN_COUNT": str(len(computes))}
            env |= {"STANDIN_COMPUTE": " ".join(computes), "STANDIN_INIT": str(init)}
        (self.folder / "compiled").write_text("")
        return subprocess.run([str(self.folder / "script")], env=env, capture_output=True, text=True, check=False)

    def compiled(self) -> list[str]:
        """The calls of nvcc in the last build, as `file target`."""
        lines = (self.folder / "compiled").read_text().splitlines()
        short = (re.sub(r" -gencode=.*code=| -arch=", " ", line) for line in lines)
        return sorted(re.sub(r"-\w+-[0-9a-f]{16}\.ptx", ".ptx", line) for line in short)

    def says(self, name: str, profile: str = "edit") -> str:
        """A constant of the generated file."""
        text = (self.folder / "target" / profile / "build" / "exl-cuda" / "out" / "fatbins.rs").read_text()
        found = re.search(rf"const {name}: [^=]*= (.*);", text)
        assert found is not None
        return found[1]

    def archs(self, *args: object, **kwargs: object) -> str:
        done = self.build(*args, **kwargs)  # type: ignore[arg-type]
        assert done.returncode == 0, done.stderr
        return " ".join(re.findall(r'"([^"]*)"', self.says("ARCHS")))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Crate:
    return Crate(tmp_path_factory.mktemp("crate"))


@pytest.fixture
def crate(built: Crate) -> Crate:
    built.kept.unlink(missing_ok=True)
    shutil.rmtree(built.folder / "target", ignore_errors=True)
    return built


@pytest.mark.parametrize(
    ("gpus", "archs"),
    [
        (None, "80+ptx"),
        ("", "80+ptx"),
        ("8.9", "89"),
        ("9.0", "90a"),
        ("8.6 8.6 7.5", "75 86"),
        ("12.0", "120"),
        ("12.1", "120+ptx"),  # newer than this nvcc knows
        ("6.1", "80+ptx"),  # older than any code of nvcc
        ("6.1 8.0", "80"),
    ],
)
def test_without_the_variable_it_is_the_gpus_present(crate: Crate, gpus: str | None, archs: str) -> None:
    assert crate.archs(gpus=gpus) == archs
    assert crate.archs("auto", gpus=gpus) == archs


def test_a_driver_that_does_not_start_is_no_gpu(crate: Crate) -> None:
    assert crate.archs(gpus="8.9", init=100) == "80+ptx"
    assert "cuInit fails with error 100" in crate.says("ORIGIN")


def test_the_variable_decides_and_the_kept_choice_follows_it(crate: Crate) -> None:
    assert crate.archs("86, 80+ptx", gpus="8.9") == "86 80+ptx"
    crate.kept.write_text("86\n")
    assert crate.archs(gpus="8.9") == "86"
    assert "kept" in crate.says("ORIGIN")
    assert crate.archs("120", gpus="8.9") == "120"
    assert crate.archs("auto", gpus="8.9") == "89"
    assert crate.archs("release").split()[-1] == "120+ptx"


def test_a_wrong_list_stops_the_build(crate: Crate) -> None:
    done = crate.build("86 ada")
    assert done.returncode != 0
    assert '"ada" is not an architecture' in done.stderr


def test_none_is_a_module_without_kernels(crate: Crate) -> None:
    assert crate.archs("none", profile="edit") == ""
    assert crate.build("none", nvcc=False, profile="release").returncode == 0
    assert "EXL_CUDA_ARCHS: none" in crate.says("NOTE", "release")


def test_without_nvcc_wheels_fail_and_checkouts_say_so(crate: Crate) -> None:
    assert crate.archs(nvcc=False) == ""
    assert "no nvcc found" in crate.says("NOTE")
    for asked in ({"profile": "release"}, {"archs": "89"}):
        done = crate.build(nvcc=False, **asked)  # type: ignore[arg-type]
        assert done.returncode != 0
        for words in ("no nvcc found", "cuda-toolkit[nvcc", "EXL_CUDA_HOME", "EXL_CUDA_ARCHS=none"):
            assert words in done.stderr


def test_images_are_kept_by_content_for_each_architecture(crate: Crate) -> None:
    assert crate.archs("80") == "80"
    assert crate.compiled() == ["one.cu sm_80", "two.cu sm_80"]
    assert crate.archs("80 80+ptx") == "80 80+ptx"
    assert crate.compiled() == ["one.cu compute_80", "two.cu compute_80"]
    assert crate.build("80", profile="release").returncode == 0
    assert crate.compiled() == []
    header = crate.folder / "rust" / "exl-cuda" / "kernels" / "some" / "shared.cuh"
    text = header.read_text()
    header.write_text(text + "// edited\n")
    assert crate.archs("80") == "80"
    assert crate.compiled() == ["one.cu sm_80"]
    header.write_text(text)
    assert crate.archs("80") == "80"
    assert crate.compiled() == []


def test_architectures_of_a_family_share_ptx(crate: Crate) -> None:
    crate.archs("80 86 90a 100 120 120+ptx")
    assert [line.removeprefix("one.") for line in crate.compiled() if line.startswith("one")] == [
        "cu compute_100",
        "cu compute_80",
        "cu sm_90a",
        "ptx compute_100",
        "ptx sm_100",
        "ptx sm_120",
        "ptx sm_80",
        "ptx sm_86",
    ]
    assert not list((crate.folder / "target").rglob("*.ptx"))
    assert crate.archs("86 89") == "86 89"
    assert crate.compiled() == ["one.cu sm_89", "two.cu sm_89"]
    crate.archs("75 89 120+ptx")
    assert crate.compiled() == ["one.cu sm_75", "two.cu sm_75"]


def test_no_kernel_asks_for_an_architecture_within_a_family() -> None:
    texts = [path.read_text() for path in (CRATE / "kernels").rglob("*.cu*")]
    asked = {line for text in texts for line in text.splitlines() if "__CUDA_ARCH__" in line and line.startswith("#")}
    numbers = {(sign, int(n)) for line in asked for sign, n in re.findall(r"__CUDA_ARCH__ (\S+) (\d+)", line)}
    assert {sign for sign, _ in numbers} <= {">=", "<"}
    assert not {number for _, number in numbers if 800 < number <= 890 or 1000 < number <= 1200}


def test_kernels_that_the_code_cannot_have_are_not_compiled(crate: Crate) -> None:
    kernels = crate.folder / "rust" / "exl-cuda" / "kernels" / "some"
    names = ("few", "attention_teams_q4", "batch_gptq_32", "batch_mma_gptq_32")
    prompts = ("attention_small_256_q4", "attention_small_128_q4")
    sources = [kernels / f"{name}.cu" for name in (*names, *prompts)]
    few, teams, wgmma, mma, small, turing = (source.name for source in sources)
    for source in sources:
        source.write_text(f"// {source.name}\n")
    try:
        for arch, expected in (
            ("75", {small, turing}),
            ("80+ptx", {teams, mma, small}),
            ("90a", {few, wgmma}),
            ("120", {few, mma, teams, small}),
        ):
            assert crate.archs(arch) == arch
            assert {line.split()[0] for line in crate.compiled()} == {"one.cu", "two.cu"} | expected
    finally:
        for source in sources:
            source.unlink()


def test_the_table_names_every_image_with_its_architecture(crate: Crate) -> None:
    crate.archs("80 90a")
    text = (crate.folder / "target" / "edit" / "build" / "exl-cuda" / "out" / "fatbins.rs").read_text()
    rows = re.findall(r'\("(\w+)", "(\w+)", include_bytes!\("([^"]*)"\)\)', text)
    assert [row[:2] for row in rows] == [(file, arch) for file in ("one", "two") for arch in ("80", "90a")]
    for _, arch, path in rows:
        assert Path(path).read_text().strip() == f"-gencode=arch=compute_{arch},code=sm_{arch}"
        assert os.path.dirname(path).endswith("/out")
