"""Compiling native kernels, without a GPU: the cache, many processes at once, and compilers that are not there."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
import torch

from fulmen import cuda, hardware
from fulmen.cuda import compile as compiling
from fulmen.cuda import launch, tensor_map
from fulmen.flash import cuda as flash
from fulmen.flash.kernels import combine, sm90, small
from fulmen.flash.spec import FlashSpec
from fulmen.lightning.kernels import sweep
from tests import emulator, sass

ROOT = Path(__file__).parents[1]
SMALL = cuda.Variant("flash/kernels/small.cu", "flash_small_forward_kernel", "80", (
    ("HEAD_DIM", 64), ("WARPS_M", 4), ("WARPS_N", 1), ("BLOCK_N", 64), ("STAGES", 2), ("BLOCKS_PER_SM", 1), ("BF16", 1),
    ("CAUSAL", 0),
), small.ARGUMENTS)  # fmt: skip
CACHED = (compiling.cubin_or_reason, launch.loaded_or_reason, compiling.nvrtc)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FULMEN_CACHE_DIR", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache"
    forget()


def forget():
    for function in CACHED:
        function.cache_clear()


def elf(code: bytes) -> bool:
    return code.startswith(b"\x7fELF")


def test_compiled_once_and_kept(folder, monkeypatch):
    code = cuda.cubin(SMALL)
    assert elf(code)
    (file,) = folder.iterdir()
    forget()
    monkeypatch.setattr(compiling, "compile_text", None)  # must not be called
    assert cuda.cubin(SMALL) == code
    assert list(folder.iterdir()) == [file]


def test_what_the_name_depends_on(monkeypatch):
    text = (cuda.PACKAGE / SMALL.source).read_text()
    macros = (*SMALL.macros[:-1], ("CAUSAL", 1))
    names = {
        compiling.cache_file(SMALL, text).name,
        compiling.cache_file(SMALL, text + " ").name,
        compiling.cache_file(SMALL._replace(arch="90a"), text).name,
        compiling.cache_file(SMALL._replace(macros=macros), text).name,
    }
    module, _ = compiling.nvrtc()
    monkeypatch.setattr(compiling, "nvrtc", lambda: (module, (1, 2)))
    names.add(compiling.cache_file(SMALL, text).name)
    assert len(names) == 5


@pytest.mark.parametrize("damage", [b"", b"nonsense", "half"])
def test_a_damaged_file_is_made_again(folder, damage):
    code = cuda.cubin(SMALL)
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:1000] if damage == "half" else damage)
    forget()
    assert cuda.cubin(SMALL) == code
    forget()
    assert compiling.read(file) == code


def test_a_folder_that_cannot_be_written(folder, monkeypatch):
    folder.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="not kept"):
        assert elf(cuda.cubin(SMALL))


def test_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FULMEN_CACHE_DIR", "/a/b")
    assert compiling.cache_folder() == Path("/a/b")
    monkeypatch.delenv("FULMEN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert compiling.cache_folder() == Path("/x/fulmen")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compiling.cache_folder() == tmp_path / ".cache" / "fulmen"


def test_the_folder_is_the_user_s_own(folder):
    cuda.cubin(SMALL)
    (file,) = folder.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="users and their rights, as POSIX has them")
@pytest.mark.parametrize("right", [0o020, 0o002])
@pytest.mark.parametrize("which", ["file", "folder"])
def test_what_others_can_write_is_not_loaded(folder, which, right):
    code = cuda.cubin(SMALL)
    (file,) = folder.iterdir()
    planted = b"not what was compiled"
    file.write_bytes(hashlib.sha256(planted).digest() + planted)
    assert compiling.read(file) == planted
    path = file if which == "file" else folder
    path.chmod(path.stat().st_mode | right)
    forget()
    with pytest.warns(UserWarning, match=rf"compiled again: {path} can be written by other users"):
        assert cuda.cubin(SMALL) == code
    path.chmod(0o700)
    assert compiling.read(file) == code  # ours has taken its place


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="users and their rights, as POSIX has them")
def test_what_belongs_to_another_user_is_not_loaded(folder, monkeypatch):
    code = cuda.cubin(SMALL)
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    forget()
    with pytest.warns(UserWarning, match="compiled again: .* belongs to another user"):
        assert cuda.cubin(SMALL) == code


def test_many_processes_at_once(folder, fresh_process):
    program = (
        "import warnings; warnings.simplefilter('error')\n"
        "from tests.test_cuda import SMALL, cuda; import hashlib; print(hashlib.sha256(cuda.cubin(SMALL)).hexdigest())"
    )
    results = fresh_process.at_once(program, program, program)
    assert {done.returncode for done in results} == {0}, results
    assert len({done.stdout for done in results}) == 1
    assert len(list(folder.iterdir())) == 1  # no temporary file is left


def test_many_threads_at_once(folder, monkeypatch):
    monkeypatch.setattr(compiling, "compile_text", compiling.compile_text.__wrapped__)  # not what is kept of it
    results: list[bytes] = []
    threads = [threading.Thread(target=lambda: results.append(cuda.cubin(SMALL))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len(set(results)) == 1


# ------------------------------------------------------------------------------------- what can go wrong


def reason(monkeypatch, arch: int = 90) -> str | None:
    """What the backend says about an ordinary call on a GPU of `arch`."""
    monkeypatch.setattr(hardware, "of", lambda device: hardware.TARGETS[90]._replace(arch=arch))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return flash.supports(FlashSpec(1, 1, 1, 128, 128, 64, 64, torch.bfloat16, torch.device("cuda", 0), 0.125))


def test_nothing_wrong(monkeypatch):
    assert reason(monkeypatch) is None


def test_no_bindings(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert "pip install 'fulmen[cuda]'" in (reason(monkeypatch) or "")
    assert "pip install 'fulmen[cuda]'" in cuda.describe()


def test_no_library(monkeypatch):
    from cuda.bindings import nvrtc

    def missing():
        raise RuntimeError("no libnvrtc.so.13\nlooked here and there")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", missing)
    why = reason(monkeypatch) or ""
    assert "NVRTC cannot be loaded (no libnvrtc.so.13): pip install" in why
    assert "\n" not in why


def test_an_architecture_the_compiler_does_not_know(monkeypatch):
    why = reason(monkeypatch, arch=999)
    assert why is not None
    assert why.startswith("NVRTC")
    assert "small.cu" in why


def test_a_source_that_does_not_compile(monkeypatch, tmp_path):
    (tmp_path / "flash" / "kernels").mkdir(parents=True)
    (tmp_path / "flash" / "kernels" / "small.cu").write_text('extern "C" __global__ void f() { wrongly(); }\n')
    monkeypatch.setattr(compiling, "PACKAGE", tmp_path)
    why = reason(monkeypatch) or ""
    assert "cannot compile flash/kernels/small.cu" in why
    assert "wrongly" in why
    with pytest.raises(cuda.Unavailable, match="wrongly"):
        cuda.cubin(SMALL)


def test_without_a_driver(monkeypatch):
    """Where torch says there is a GPU and the driver does not: a sentence as well."""
    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    answer = launch.loaded_or_reason.__wrapped__
    monkeypatch.setattr(torch.cuda, "device", lambda index: threading.Lock())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"query": lambda self: True})())
    assert "driver" in str(answer(SMALL, 0, 1000)).lower()


def test_a_map_made_by_a_thread_without_a_context(monkeypatch):
    """As the threads of autograd are, until something there has used the GPU."""
    answers, made = [launch.INVALID_CONTEXT, 0], []
    driver = types.SimpleNamespace(
        cuTensorMapEncodeTiled=lambda *args: made.append(args) or answers.pop(0),
        cuDevicePrimaryCtxRetain=lambda context, device: made.append(device) or 0,
        cuCtxSetCurrent=lambda context: made.append("current"),
    )
    monkeypatch.setattr(launch, "library", lambda: driver)
    monkeypatch.setattr(tensor_map, "library", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    call = torch.bfloat16, 4096, (64, 100, 2, 1), (128, 12800, 25600), (64, 64, 1, 1)
    assert len(tensor_map.encode(*call)) == 128
    assert made[1:3] == [3, "current"]
    assert made[0] == made[3]
    tensor_map.encode.cache_clear()
    answers += [1]
    with pytest.raises(ValueError, match=r"TMA cannot read sizes .* CUDA error 1"):
        tensor_map.encode(*call)


def test_doctor_tells(fresh_process, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    program = "import runpy, sys; sys.argv = ['fulmen', 'doctor']; runpy.run_module('fulmen', run_name='__main__')"
    told = fresh_process(program)
    assert "NVRTC" in told
    assert "libnvrtc" in told  # where it was found


def test_importing_fulmen_compiles_nothing():
    program = "import sys, fulmen; assert not any(m.split('.')[0] == 'cuda' for m in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


# --------------------------------------------------------------------------- registers a product still reads


def listing(*lines: str) -> str:
    """As nvdisasm prints it: labels, and instructions behind their address."""
    return "\n".join(
        line if line.startswith(".L_") else f"        /*{16 * i:04x}*/  {line} ;" for i, line in enumerate(lines)
    )


PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR4], R24, gsb0"  # reads R4 to R7, and ends a group
WAIT, LATER, OVERWRITES = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1", "MOV R6, R80"


@pytest.mark.parametrize(
    "code",
    [
        [PRODUCT, OVERWRITES, WAIT],
        [PRODUCT, "@!P0 MOV R6, R80", WAIT],
        [PRODUCT, "LDS.128 R4, [R80]", WAIT],
        [PRODUCT, "LDS.64 R6, [R80]", WAIT],
        [PRODUCT, "LDSM.16.MT88.4 R4, [R80]", WAIT],
        [PRODUCT, "IMAD.WIDE R6, R80, 0x4, R82", WAIT],
        [PRODUCT, "LOP3.LUT P0, R7, R80, R81, RZ, 0x3c, !PT", WAIT],
        [PRODUCT, "HGMMA.64x64x16.F32.BF16 R0, gdesc[UR8], R0, gsb0", WAIT],  # into R0 to R31
        ["HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR4], R24", PRODUCT.replace("R4", "R8"), "MOV R5, RZ", WAIT],
        [PRODUCT, PRODUCT.replace("R4", "R8"), LATER, "MOV R8, R80", WAIT],  # of the later one, which may still run
        # across the back edge of a loop
        [".L_x_1:", OVERWRITES, "WARPGROUP.ARRIVE", PRODUCT, "@P0 BRA `(.L_x_1)", WAIT],
        # on one side of a branch, whatever it depends on
        [PRODUCT, "@P0 BRA `(.L_x_1)", WAIT, "EXIT", ".L_x_1:", OVERWRITES, WAIT],
        [PRODUCT, "@P0 BRA `(.L_x_1)", OVERWRITES, ".L_x_1:", WAIT],
        [PRODUCT, "BRA.U UP0, `(.L_x_1)", OVERWRITES, ".L_x_1:", WAIT],
        [PRODUCT, "BRA.DIV UR4, `(.L_x_1)", WAIT, "EXIT", ".L_x_1:", OVERWRITES, WAIT],
    ],
    ids=lambda code: " | ".join(code)[:80],
)  # fmt: skip
def test_a_register_overwritten_in_use_is_found(code):
    (found,) = sass.overwritten(listing(*code, "EXIT"))
    assert "overwrites" in found


@pytest.mark.parametrize(
    "code",
    [
        [PRODUCT, WAIT, OVERWRITES],
        [PRODUCT, PRODUCT.replace("R4", "R8"), LATER, OVERWRITES, WAIT],  # of the earlier one, which is over
        [PRODUCT, "MOV R8, R6", "STS.128 [R80], R4", "ISETP.GE.AND P0, PT, R6, R80, PT", "R2UR UR4, R6", WAIT],
        [PRODUCT, "MOV R3, R80", "LDS.64 R2, [R80]", "MOV RZ, R80", WAIT],
        [".L_x_1:", OVERWRITES, "WARPGROUP.ARRIVE", PRODUCT, WAIT, "@P0 BRA `(.L_x_1)"],
        [PRODUCT, "BRA `(.L_x_1)", OVERWRITES, ".L_x_1:", WAIT],  # nobody comes by
        [PRODUCT, "EXIT", OVERWRITES],
    ],
    ids=lambda code: " | ".join(code)[:80],
)  # fmt: skip
def test_what_is_no_hazard(code):
    assert sass.overwritten(listing(*code, "EXIT")) == []


# ------------------------------------------------------------------------------------------------- arguments

ARGUMENTS = {
    "sm90": sm90.ARGUMENTS, "combine": combine.ARGUMENTS, "small": small.ARGUMENTS,
    "sweep": sweep.ARGUMENTS, "one sweep": sweep.SWEEP, "strides": cuda.STRIDES,
    "gaps": cuda.Struct("Gaps", ("a", "int"), ("b", "char *"), ("c", "float", 3), ("d", cuda.STRIDES, 2), ("e", "int")),
}  # fmt: skip


@pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_fields_lie_where_c_puts_them(name, tmp_path):
    """The declaration, compiled: offsets and size."""
    made = ARGUMENTS[name]
    lines = [f'printf("%zu ", offsetof({made.name}, {field.name}));' for field in made.fields]
    program = f"""#include <cstddef>
#include <cstdio>
struct float2;
struct float4;
{compiling.TENSOR_MAP}
{made.declaration()}
int main() {{ {" ".join(lines)} printf("%zu %zu", sizeof({made.name}), alignof({made.name})); }}
"""
    command = [emulator.COMPILER, "-std=c++17", "-xc++", "-", "-o", str(tmp_path / "offsets")]
    subprocess.run(command, input=program, text=True, check=True)
    told = subprocess.run([tmp_path / "offsets"], capture_output=True, text=True, check=True).stdout
    assert [*made.offsets.values(), made.size, made.align] == [int(word) for word in told.split()]


def test_constants_are_packed_behind_what_a_call_brings():
    made = cuda.Struct(
        "Args", ("map", "TensorMap"), ("o", "char *"), ("n", "int"), ("strides", cuda.STRIDES), ("x", "float")
    )
    front, rest = made.bind({"n": 7, "strides": (1, 2, 3), "x": 0.5})
    assert len(rest) == made.size == 192
    whole = bytearray(rest)
    front.pack_into(whole, 0, bytes(range(128)), 1 << 40)
    assert whole == bytes(range(128)) + struct.pack("=Qi4x3qf", 1 << 40, 7, 1, 2, 3, 0.5) + bytes(20)
    assert made.bind({})[0].size == 172
    for wrong in ({"n": 7, "x": 0.5}, {"x": 0.5, "n": 7, "strides": (1, 2, 3)}):
        with pytest.raises(ValueError, match="Args ends with"):
            made.bind(wrong)


# -------------------------------------------------------------------------------------- sources that include


def test_what_a_source_includes_is_put_in_its_place(monkeypatch, tmp_path):
    (tmp_path / "op").mkdir()
    (tmp_path / "shared.cuh").write_text("// shared\n\n")
    (tmp_path / "op" / "more.cuh").write_text('#include "shared.cuh"\nint more;\n')
    (tmp_path / "op" / "kernel.cu").write_text('a\n#include "op/more.cuh"\nb  // #include "shared.cuh"\n')
    monkeypatch.setattr(compiling, "PACKAGE", tmp_path)
    assert compiling.included("op/kernel.cu") == 'a\n// shared\nint more;\nb  // #include "shared.cuh"\n'
    (tmp_path / "shared.cuh").unlink()
    variant = SMALL._replace(source="op/kernel.cu")
    with pytest.raises(cuda.Unavailable, match=r"shared\.cuh"):
        cuda.cubin(variant)


def test_a_changed_include_is_another_kernel(monkeypatch, tmp_path):
    """The cache's name is made of the text with everything it includes."""
    (tmp_path / "k.cu").write_text('#include "x.cuh"\n')
    monkeypatch.setattr(compiling, "PACKAGE", tmp_path)
    names = set()
    for text in ("int a;", "int b;"):
        (tmp_path / "x.cuh").write_text(text)
        names.add(compiling.cache_file(SMALL, compiling.included("k.cu")).name)
    assert len(names) == 2


@pytest.mark.parametrize("source", sorted(str(path.relative_to(cuda.PACKAGE)) for path in cuda.PACKAGE.rglob("*.cu")))
def test_no_include_is_left(source):
    assert "#include" not in compiling.included(source)
