"""Compile for a Hopper GPU without one: launches are caught on their way and built by ptxas.

Run as a program, without the interpreter: launches every operator at a model's true dimensions on
CPU tensors that are never touched, and prints one line a kernel: registers, stack bytes (spills),
shared memory. Small steps of any number of rows must get the same kernels, and one that may begin
early writes nothing before it waits. Knows how Triton specialises arguments; `compiled` must agree
with it.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import triton
from launches import LAUNCHES
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

TARGET = GPUTarget("cuda", 90, 32)
SHARED_LIMIT = 227 * 1024
# One, a multiple of no power of two, and one of 16: the sizes that Triton would tell apart.
ROWS = (1, 3, 16)
_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg", "launch_pdl")


def compiled(
    function: JITFunction, args: tuple[object, ...], kwargs: dict[str, object]
) -> CompiledKernel:
    """Build one launch's kernel as the launch itself would."""
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    values = dict(zip(function.arg_names, args, strict=False)) | kwargs
    assert set(values) == set(function.arg_names), set(function.arg_names) ^ set(values)
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(function.params):
        value = values[parameter.name]
        plain = parameter.do_not_specialize
        divisible = False
        if parameter.is_constexpr or value is None or (value is True) or (value is False):
            signature[parameter.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
            divisible = value.data_ptr() % 16 == 0
        elif isinstance(value, TensorDescriptor):
            block = ",".join(map(str, value.block_shape))
            signature[parameter.name] = f"tensordesc<{_TYPES[value.base.dtype][1:]}[{block}]>"
        elif isinstance(value, int):
            if value == 1 and not plain:
                signature[parameter.name], constants[(i,)] = "constexpr", 1
            else:
                signature[parameter.name] = "i32" if abs(value) < 1 << 31 else "i64"
                divisible = value % 16 == 0 and not plain
        else:
            assert isinstance(value, float), (parameter.name, value)
            signature[parameter.name] = "fp32"
        if divisible:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, attributes)
    return triton.compile(source, target=TARGET, options=options)


def resources(kernel: CompiledKernel) -> dict[str, int]:
    """REG, STACK and so on of a compiled kernel, by cuobjdump."""
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    line = next(line for line in text.splitlines() if "REG:" in line)
    pairs = [word.split(":") for word in line.split() if word.count(":") == 1]
    return {name: int(value) for name, value in pairs if value.isdigit()}


def stores_before_it_waits(kernel: CompiledKernel) -> bool:
    """Whether a kernel that may begin beside the one before it writes before that one has ended."""
    begun, waits, _ = kernel.asm["ptx"].partition("griddepcontrol.wait")
    return bool(waits) and re.search(r"\b(st|red|atom)\.global", begun) is not None


@contextmanager
def caught(found: dict[str, CompiledKernel]) -> Iterator[None]:
    """While it lasts, a launch compiles its kernel into ``found`` (by hash) and runs nothing."""
    launch = JITFunction.run

    def run(self: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        kernel = compiled(self, args, kwargs)
        found[kernel.hash] = kernel

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = launch


def main(names: list[str]) -> None:
    for name in names or list(LAUNCHES):
        print(f"# {name}")
        each: list[dict[str, CompiledKernel]] = []
        for rows in ROWS:
            each.append({})
            with caught(each[-1]):
                LAUNCHES[name](rows)
        # A size that chose another kernel could choose other bits, or compile while serving.
        for rows, kernels in zip(ROWS, each, strict=True):
            other = kernels.keys() ^ each[0].keys()
            differing = sorted({(kernels | each[0])[key].metadata.name for key in other})
            assert not other, f"{rows} rows and {ROWS[0]} have different kernels: {differing}"
        for kernel in each[0].values():
            use, shared = resources(kernel), kernel.metadata.shared
            assert shared <= SHARED_LIMIT, f"{kernel.metadata.name}: {shared} bytes shared"
            assert not stores_before_it_waits(kernel), kernel.metadata.name
            print(
                f"{kernel.metadata.name:<16} {use['REG']:3d} registers x"
                f" {kernel.metadata.num_warps:2d} warps, stack {use['STACK']:4d},"
                f" shared {shared:6d}"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
