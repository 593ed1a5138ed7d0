"""Compiles all kernels for CUDA, without a GPU, and prints their names.

    TRITON_INTERPRET=0 python tests/stage/fused/compile_all.py

To try another Triton: `pip install --target other --no-deps triton==3.5.1`, with `other` first in PYTHONPATH. The
kernels compiled with 3.4.0, 3.5.1, 3.6.0, 3.7.1, 3.8.0 and 3.9.0.
"""

# Type checkers do not know what `triton.compile` returns.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

import re
import subprocess
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gpuload import transforms as T
from gpuload.stage.backend import ResultFormat
from gpuload.stage.fused import erasing, kernel, mixing, separable, statistics, variants
from gpuload.transforms.program.fusing import jobs
from gpuload.transforms.program.fusing.plan import KernelTile
from gpuload.transforms.program.ops import OPS

TILE = KernelTile(8, 32, 1)
POINTERS = {
    **dict.fromkeys(("pixels_ptr", "tables_ptr", "source_ptr", "statistics_ptr"), "*u8"),
    **dict.fromkeys(("jobs_ptr", "pairs_ptr", "bounds_ptr", "records_ptr"), "*i64"),
    **dict.fromkeys(("ints_ptr", "codes_ptr", "boxes_ptr"), "*i64"),
    **dict.fromkeys(("counts_ptr", "table_ptr", "weights_ptr"), "*i32"),
    **dict.fromkeys(("quantiles_ptr", "constants_ptr"), "*fp32"),
    **dict.fromkeys(("factors_ptr", "floats_ptr", "values_ptr"), "*fp64"),
}


def compile_kernel(function, images="*bf16", options=None, capability=80, **constants):
    types = {"images_ptr": images, "output_ptr": images, **POINTERS}
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    constants = {(names.index(name),): value for name, value in constants.items()}
    # As at a launch, whose arrays begin at multiples of 16 bytes.
    aligned = {
        (index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if signature[name].startswith("*")
    }
    source = ASTSource(function, signature, constexprs=constants, attrs=aligned)
    options = {"enable_fp_fusion": False, **(options or {})}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    assert re.search(r"\b(?:st|red|atom)\.global", ptx), f"{compiled.metadata.name} writes nothing"
    if function is kernel.one_pass:
        # Hints about pairs (see geometry.py) must not make the compiler access two pixels at once.
        accesses_to_pairs = re.findall(r"(?:st|ld)\.global\.v\d\.[a-z]8|st\.global\.v|ld\.global\.v2", ptx)
        assert not accesses_to_pairs, accesses_to_pairs
    print(compiled.metadata.name, flush=True)
    return compiled


for channels in (1, 3):
    compile_kernel(statistics._count, CHANNELS=channels, BLOCK=1024)
    compile_kernel(statistics._tabulate, CHANNELS=channels)
    compile_kernel(erasing._erase_images, CHANNELS=channels, ROWS=8, COLUMNS=16)
for images in ("*fp32", "*fp16", "*u8"):
    compile_kernel(mixing._mix, images, CHANNELS=3, CHANNELS_LAST=False, ALIGNED=True, BLOCK=512)
compile_kernel(mixing._mix, CHANNELS=1, CHANNELS_LAST=True, ALIGNED=False, BLOCK=512)
compile_kernel(erasing._erase_images, CHANNELS=1, ROWS=8, COLUMNS=16, column_stride=1)
ALL_FILTERS, BILINEAR = 1 << jobs.NEAREST | 1 << jobs.BILINEAR | 1 << jobs.BICUBIC, 1 << jobs.BILINEAR
for kind, filters in ((jobs.RESIZE, ALL_FILTERS), (jobs.BLUR, 0)):
    compile_kernel(separable._weigh, GEOMETRY=kind, FILTERS=filters, ROWS=8, COLUMNS=32, options={"num_warps": 1})
ALL_OPERATIONS = (1 << len(OPS) + 1) - 1  # and the erasing of boxes
tile = {"CHANNELS": 3, "OUT_CHANNELS": 3, "ROWS": 8, "COLUMNS": 32}
no_operations = {**tile, "FILTERS": BILINEAR, "OPERATIONS": 0, "ERASES": False}
for kind in (jobs.COPY, jobs.WARP, jobs.BLUR, jobs.SHARPNESS):
    options = kernel.compiler_options(kind, warps=1)
    constants = {**no_operations, "FILTERS": ALL_FILTERS, "GEOMETRY": kind, "OUT_COLUMN": 3, "FINISHED": False}
    compile_kernel(kernel.one_pass, "*u8", options, **constants)
for channels, out_channels, images in ((1, 1, "*fp32"), (3, 1, "*bf16")):
    constants = {**tile, "CHANNELS": channels, "OUT_CHANNELS": out_channels, "OPERATIONS": ALL_OPERATIONS}
    constants |= {"GEOMETRY": jobs.COPY, "FILTERS": 0, "OUT_COLUMN": 1, "FINISHED": True, "ERASES": True}
    compile_kernel(kernel.one_pass, images, **constants)
# The longest passes of most recipes: threads exchange nothing, and all numbers stay in registers.
all_operations = {**tile, "FILTERS": ALL_FILTERS, "OPERATIONS": ALL_OPERATIONS, "ERASES": True}
for capability, kind, options_of_pass, column in (
    (80, jobs.RESIZE, no_operations, 1),
    (90, jobs.RESIZE, no_operations, 1),
    (90, jobs.RESIZE, no_operations, 3),
    (90, jobs.RESIZE, all_operations, 1),
    (90, jobs.RESIZE, no_operations, 0),
    (90, jobs.COPY, all_operations, 0),
    (90, jobs.COPY, all_operations, 3),
):
    options = kernel.compiler_options(kind, warps=1)
    constants = {**options_of_pass, "GEOMETRY": kind, "FINISHED": True, "OUT_COLUMN": column}
    compiled = compile_kernel(kernel.one_pass, "*fp16", options, capability, **constants)
    assert compiled.metadata.shared == 0
    assert "bar.sync" not in compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    stack = int(re.search(r" STACK:(\d+) ", usage)[1])
    assert stack <= 16, usage  # 0 bytes with Triton 3.4 to 3.7; with 3.9, one kernel has 8 bytes
    assert " LOCAL:0 " in usage, usage


# The kernels compiled when a session starts have the same keys in Triton's cache as the kernels that launches need.
class Driver:
    """A driver for a GPU that this machine need not have."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


triton.runtime.driver.set_active(Driver())
result_format = ResultFormat((3, 3), torch.float16, 3, (True,))
outlines = [T.RandomErasing().outline[0], T.MixUp(num_classes=2).outline[0]]
finishing = variants.late_variants([outlines], result_format=result_format)
session_variants = finishing | variants.level_variants(
    [T.Resize(9).outline, T.ColorJitter(contrast=1).outline], result_format=result_format, tile=TILE
)
# Passes take seconds to compile, and differ only in constants, so one pass is enough.
passes = [variant for variant in session_variants if variant.kernel == "one_pass"]
without_erasing = [variant for variant in passes if not dict(variant.options)["ERASES"]]
pass_without_erasing = next(variant for variant in without_erasing if variant.args[-1] == torch.uint8)
for variant in {*session_variants} - {*passes} | {pass_without_erasing}:
    function, options = variants.KERNELS[variant.kernel], dict(variant.options)
    function.warmup(*variant.args, grid=(1, 1), **options)
    compiled_kernels = len(function.device_caches[0][0])
    arguments = [torch.empty(64, dtype=arg) if isinstance(arg, torch.dtype) else arg for arg in variant.args]
    function.warmup(*arguments, grid=(1, 1), **options)
    for height in (1, 16, 32, 224, 7):
        function.warmup(*(height if arg is variants.NUMBER else arg for arg in arguments), grid=(1, 1), **options)
    assert len(function.device_caches[0][0]) == compiled_kernels, f"a launch of {variant} would compile another kernel"
print("variants", flush=True)
