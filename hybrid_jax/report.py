"""What a person reads about a run before it starts: the banner, --dry_run, --dry_run=compile, and whether it
fits.

Plain text out of plain data; jax is imported only by what has to ask or compile.
"""

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybrid_jax import __version__, collectives, flops, pattern, planner
from hybrid_jax.config import Config
from hybrid_jax.config_checks import check_cuts, check_devices, mesh_shape
from hybrid_jax.errors import UserError

BYTES_PER_PARAMETER = {"parameters": 4, "gradients": 4, "optimizer": 8}  # all fp32; AdamW has two moments

# Dense bf16 TFLOP/s (no sparsity) by the vendors' data sheets (AMD Instinct MI300X, MI325X, MI350X, MI355X;
# NVIDIA H100, H200, A100). A part of jax's device_kind finds its row, the first that matches.
PEAK_TFLOPS = (
    ("MI355X", 2516.0),
    ("MI350X", 2307.0),
    ("MI325X", 1307.0),
    ("MI300X", 1307.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("H200 NVL", 836.0),
    ("H200", 989.0),
    ("A100", 312.0),
)


def peak_flops(device_kind: str) -> float:
    """Peak dense bf16 FLOP/s of one device by its `device_kind`; 0.0 if unknown (no MFU is shown then)."""
    for name, tflops in PEAK_TFLOPS:
        if name.lower() in device_kind.lower():
            return tflops * 1e12
    return 0.0


def tokens_per_step(config: Config) -> int:
    return config.train.global_batch_size * config.train.sequence_length


def banner(config: Config, devices: Sequence[Any], workdir: str | Path) -> str:
    """The lines a run starts with. `devices`: all devices of the run (`jax.devices()`)."""
    kinds = sorted({device.device_kind for device in devices})
    processes = len({device.process_index for device in devices})
    data, fsdp, tensor = mesh_shape(config.mesh, len(devices))
    lines = [
        f"hybrid_jax  {__version__}",
        f"devices     {len(devices)} x {', '.join(kinds)} ({devices[0].platform})" + _of_processes(processes),
        f"mesh        data {data} x fsdp {fsdp} x tensor {tensor}",
        *_warnings(config),
        *_model_lines(config),
        *_token_lines(config),
        f"output      {workdir}",
    ]
    return "\n".join(lines)


def dry_run(config: Config) -> str:
    """The table of --dry_run: parameters, FLOPs, tokens, bytes per device. Builds nothing, imports no jax."""
    model, total = config.model, flops.parameter_count(config.model)
    per_token = flops.flops_per_token(model, config.train.sequence_length)
    rows = [("part", "count", "parameters", "share", "FLOPs a token", "share")]
    for part, count, cost in flops.breakdown(model, config.train.sequence_length):
        share, work = cost.parameters / total, 3.0 * cost.flops
        rows.append(
            (
                part,
                f"{count}",
                f"{cost.parameters:,}",
                f"{share:.1%}",
                f"{work:.3e}",
                f"{work / per_token:.1%}",
            )
        )
    rows.append(("total", "", f"{total:,}", "", f"{per_token:.3e}", ""))
    head = [*_model_lines(config), *_token_lines(config)]
    return "\n".join([*head, "", *aligned(rows), "", *memory(config)])


def memory(config: Config) -> list[str]:
    """Two tables of --dry_run: what a device of the config's mesh is predicted to hold, and which GPUs that fits.

    Raises UserError where the batch does not divide over the mesh.
    """
    mesh, (first, *_) = planner.mesh_of(config), planner.GPUS
    if config.kernels.backend == "reference":
        return ["memory      not predicted: kernels.backend 'reference' is for tests, and keeps a state for each token"]
    plan = planner.predict(config, mesh, first.arch)
    names = list(plan.moments)
    parts = list(dict.fromkeys(part for name in names for part in plan.moments[name]))
    rows = [("predicted, GiB a device", *names)]
    for part in parts:
        rows.append((part, *(_gib(plan.moments[name].get(part, 0)) for name in names)))
    rows.append(("total", *(_gib(sum(plan.moments[name].values())) for name in names)))
    shape = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
    planned = ", as mesh.data is -1" if config.mesh.data == -1 else ""
    if planned and math.prod(mesh.values()) <= planner.NODE:
        planned += f" and a node has {planner.NODE} devices"
    rows_at_once = f"{plan.micro_batch} row{'s'[: plan.micro_batch != 1]} at once"
    steps = f", {plan.accumulation} accumulation steps" if plan.accumulation > 1 else ""
    lines = [f"planned for {shape}{planned}: {rows_at_once}{steps}", *_warnings(config)]
    if config.checkpoint.every_steps:
        lines.append(f"a checkpoint's copy of the state takes {_gib(plan.state)} GiB more, where that is free")
    fitting = [("device", "GiB", "usable", "peak", "fits", "largest micro batch", "least remat for this one")]
    for gpu in planner.GPUS:
        peak = planner.predict(config, mesh, gpu.arch).peak
        fits = "no" if peak > gpu.usable else "tight" if peak > planner.TIGHT * gpu.usable else "yes"
        micro = planner.largest_micro_batch(config, mesh, gpu)
        least = planner.cheapest_remat(config, mesh, gpu)
        fitting.append(
            (
                gpu.name,
                f"{gpu.memory / planner.GIB:.0f}",
                f"{gpu.usable / planner.GIB:.1f}",
                f"{peak / planner.GIB:.1f}",
                fits,
                f"{micro}" if micro else "none fits",
                planner.describe_remat(*least) if least else "none fits",
            )
        )
    return [*lines, "", *aligned(rows), "", *aligned(fitting)]


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}" if size else ""


def on_these_devices(config: Config) -> Config:
    """`on_devices` for those here."""
    import jax

    return on_devices(config, jax.device_count(), jax.process_count())


def on_devices(config: Config, count: int, processes: int = 1) -> Config:
    """`config` with the size of mesh.data that `count` devices make. Raises UserError where it cannot run on them."""
    check_devices(config, count, processes)
    data, _, _ = mesh_shape(config.mesh, count)
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, data=data))


def compiled(config: Config) -> str:
    """Compiles the training step for the devices here: its memory and its collectives. Raises UserError."""
    import jax

    from hybrid_jax import sharding, step

    mesh = sharding.make_mesh(config.mesh)
    executable = step.compile_step(config, mesh)
    memory: Any = executable.memory_analysis()
    rows = [("compiled step, bytes a device", "bytes", "GiB")]
    sizes = {
        "arguments (state, batch)": memory.argument_size_in_bytes,
        "results, not in the arguments' place": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporary (gradients, activations)": memory.temp_size_in_bytes,
    }
    for name, size in (*sizes.items(), ("total", sum(sizes.values()))):
        rows.append((name, f"{size:,}", f"{size / 2**30:.2f}"))
    shape = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    lines = [f"compiled for {shape}", "", *aligned(rows)]
    if jax.default_backend() == "cpu":
        lines.append("Compiled for the CPU, which makes fp32 of bf16, also of what is sent: an upper bound for a GPU.")
    count, found = jax.device_count(), collectives.read(executable.as_text() or "", dict(mesh.shape))
    if not found:
        return "\n".join([*lines, "", f"collectives: none ({count} device{'s'[: count > 1]})"])
    by = "The same kind, type and loops stand together; a loop's body counts as often as it runs."
    return "\n".join([*lines, "", *aligned(collectives.table(found), texts=4), by])


def check_memory(config: Config) -> None:
    """Raises UserError if parameters, gradients and moments do not fit into this machine. Imports jax."""
    import jax

    plan = planner.predict(config, planner.mesh_of(on_these_devices(config)))
    state = plan.state + plan.moments["loss"]["moments"] // 2  # gradients are cut as moments are
    local = jax.local_devices()
    if jax.default_backend() == "cpu":
        available, copies, where = host_memory(), len(local), "this machine's memory"
    else:
        available = (local[0].memory_stats() or {}).get("bytes_limit", 0)
        copies, where = 1, f"the memory of a {local[0].device_kind}"
    check_fits(flops.parameter_count(config.model), state, copies, available, where)


def check_fits(parameters: int, state: int, copies: int, available: int, where: str) -> None:
    """Raises UserError if `copies` of a device's `state` (parameters, gradients, moments; bytes) exceed `available`
    bytes (0 = unknown: passes)."""
    whole = sum(BYTES_PER_PARAMETER.values())
    if available and state * copies > available:
        times = f" on each of {copies} devices" if copies > 1 else ""
        cut = f", of which a device holds {state / (whole * parameters):.1%}," if state < whole * parameters else ""
        raise UserError(
            f"config.model: {parameters:,} parameters x {whole} bytes{cut}{times} need {state * copies:,} bytes, "
            f"but {where} is {available:,}; take a smaller config or a larger machine (see --dry_run)"
        )


def host_memory() -> int:
    """Bytes of memory this process may use: the machine's, or its control group's limit if that is lower."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            sizes.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # no such control group, or "max"
            continue
    return min(sizes)


def aligned(rows: Sequence[Sequence[str]], texts: int = 1) -> list[str]:
    """Lines of a table: the first `texts` columns to the left, the others to the right, a rule under the first row."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def _model_lines(config: Config) -> list[str]:
    model = config.model
    total, inner = flops.parameter_count(model), flops.non_embedding_count(model)
    work = flops.flops_per_token(model, config.train.sequence_length)
    return [
        f"stack       {pattern.draw(model.layout)}",
        f"parameters  {total:,} ({inner:,} without embedding and head)",
        f"compute     {_giga(work)} a token, forward and backward, in {config.train.compute_dtype}",
    ]


def _token_lines(config: Config) -> list[str]:
    train, step = config.train, tokens_per_step(config)
    return [
        f"tokens      {step:,} a step ({train.global_batch_size:,} x {train.sequence_length:,}), "
        f"{step * train.steps:,} in {train.steps:,} steps"
    ]


def _warnings(config: Config) -> list[str]:
    warning = check_cuts(config)
    return [f"warning: {warning}"] if warning else []


def _giga(number: float) -> str:
    return f"{number / 1e9:.4g} GFLOP" if number >= 1e8 else f"{number / 1e6:.4g} MFLOP"


def _of_processes(processes: int) -> str:
    return f", {processes} processes" if processes > 1 else ""
