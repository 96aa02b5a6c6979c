"""The micro-kernel as code: what it computes is tested where it is used."""

import pytest
from llvmlite import binding, ir

from specdec_core.kernels.cpu import Registers
from specdec_core.kernels.skinny_linear import panel

AVX512, AVX, NEON = Registers(32, 16), Registers(16, 8), Registers(32, 4)


def kernel(rows: int, tiles: int) -> str:
    module = ir.Module()
    panel._kernel(module, rows, tiles)
    return str(module)


def optimized(code: str) -> str:
    """By LLVM, for this CPU, with all that it would do to a loop."""
    binding.initialize_native_target()
    target = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=3
    )
    module = binding.parse_assembly(code.replace("define internal", "define"))
    module.verify()
    passes = binding.create_pass_builder(target, binding.create_pipeline_tuning_options(3))
    passes.getModulePassManager().run(module, passes)
    return str(module)


@pytest.mark.parametrize(
    ("on", "rows", "tiles", "rolled"),
    [
        (AVX512, 9, 2, True), (AVX512, 8, 2, True), (AVX512, 6, 4, True), (AVX512, 7, 2, False), (AVX512, 3, 4, False),
        (AVX, 6, 1, True), (AVX, 1, 4, True), (AVX, 3, 1, False), (NEON, 4, 1, True), (NEON, 3, 1, False),
    ],
)  # fmt: skip
def test_a_loop_is_kept_rolled_where_its_sums_fill_half_the_registers(monkeypatch, on, rows, tiles, rolled):
    monkeypatch.setattr(panel, "registers", lambda: on)
    assert ("!llvm.loop" in kernel(rows, tiles)) is rolled


def test_a_loop_that_is_kept_rolled_does_one_step_at_a_time():
    """Two kernels of one module: each says so of its own loop."""
    module, shapes = (
        ir.Module(),
        [(rows, panel.tiles_at_once(rows)) for rows in (panel.MOST_ROWS, panel.MOST_ROWS // 2)],
    )
    for shape in shapes:
        panel._kernel(module, *shape)
    sums = sum(rows * tiles for rows, tiles in shapes)
    found = optimized(str(module))
    assert max(found.count("call <16 x float> @llvm.fma"), found.count("fmul <16 x float>")) == sums
