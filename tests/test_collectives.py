"""What a compiled step sends between devices: reading it from a program, and what each kind of sublayer sends on each
kind of mesh."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from hybrid_jax import collectives

ROOT = Path(__file__).parents[1]
CUBE = {"data": 2, "fsdp": 2, "tensor": 2}

PROGRAM = """\
HloModule jit_f, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %b)
}

%inner.1 (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %ar = bf16[2,40,32]{2,1,0} all-reduce(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add, \
metadata={op_name="jit(f)/mlp"}
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %ag = bf16[32,48]{1,0} all-gather(%w), replica_groups=[4,2]<=[2,2,2]T(0,2,1), dimensions={0}
  %w2 = (s32[], f32[8]) while(%t), condition=%cond.1, body=%inner.1, \
metadata={op_name="jit(f)/layers/while/body/transpose(jvp(gqa))/while"}
}

%cond (p: (s32[], f32[8])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n)
}

%dead (p: f32[8]) -> f32[8] {
  %never = f32[8]{0} all-reduce(%p), replica_groups={}, to_apply=%add
}

ENTRY %main.2 (x: f32[8]) -> f32[8] {
  %w1 = (s32[], f32[8]) while(%t), condition=%cond, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}, metadata={op_name="jit(f)/transpose(jvp(layers))/while" stack_frame_id=3}
  %all = (f32[8]{0}, f32[4,2]{1,0}) all-reduce(%a, %b), replica_groups={}, to_apply=%add
  %alone = f32[99]{0} all-reduce(%p), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
  %alone.2 = f32[99]{0} all-reduce(%p), replica_groups=[8,1]<=[8], to_apply=%add
  %alone.3 = f32[99]{0} all-reduce(%p), replica_groups=mesh['data'=8,'fsdp'=1] {'fsdp'}
  %ars = f32[16]{0} all-reduce-start(%x), replica_groups=mesh['data'=2,'fsdp'=2,'tensor'=2] {'data','fsdp'}
  %ard = f32[16]{0} all-reduce-done(%ars)
  %start = (f32[4]{0}, f32[8]{0}) all-gather-start(%y), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  %cp = s32[3]{0} collective-permute(%z), source_target_pairs={{0,4},{4,0},{1,5},{5,1}}
  %stay = s32[3]{0} collective-permute(%z), source_target_pairs={{0,0},{1,1}}
  ROOT %fusion = f32[3]{0} fusion(%all-reduce.1), kind=kLoop, calls=%add
}
"""


def test_a_program_is_read():
    found = collectives.read(PROGRAM, CUBE)
    got = [(one.kind, one.axes, one.size, one.where, one.times) for one in found]
    assert got == [
        ("all-reduce", ("tensor",), 2 * 40 * 32 * 2, "layers > gqa", 5),
        ("all-gather", ("fsdp",), 32 * 48 * 2, "layers", 5),
        ("all-reduce", ("data", "fsdp", "tensor"), 4 * 8 + 4 * 4 * 2, "-", 1),
        ("all-reduce", ("data", "fsdp"), 4 * 16, "-", 1),
        ("all-gather", ("data", "fsdp"), 4 * 8, "-", 1),
        ("collective-permute", ("data",), 4 * 3, "-", 1),
    ]
    assert found[0].arrays == (("bf16", (2, 40, 32)),) and found[0].scope == "jit(f)/mlp"
    assert found[0].loops == (collectives.Loop("layers", 5), collectives.Loop("gqa", 0))
    assert collectives.read("ENTRY %m (x: f32[3]) -> f32[3] {\n  %x = f32[3]{0} add(%a, %b)\n}", CUBE) == []


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",)),
        ("{{0,2},{1,3},{4,6},{5,7}}", ("fsdp",)),
        ("{{0,2,4,6},{1,3,5,7}}", ("data", "fsdp")),
        ("[2,4]<=[8]", ("fsdp", "tensor")),
        ("[4,2]<=[8]", ("tensor",)),
        ("[4,2]<=[2,4]T(1,0)", ("data",)),
        ("[2,4]<=[2,2,2]T(1,0,2)", ("data", "tensor")),
        ("[1,8]<=[8]", ("data", "fsdp", "tensor")),
        ("{}", ("data", "fsdp", "tensor")),
        ("mesh['axis_0'=1,'axis_1'=4,'axis_2'=1,'axis_3'=2] {'axis_1'}", ("data", "fsdp")),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", ("tensor",)),
        ("mesh['axis_0'=2,'axis_1'=2,'axis_2'=2] {'axis_0','axis_2'}", ("data", "tensor")),
        ("mesh['data'=2,'fsdp'=2,'tensor'=2] {'fsdp'}", ("fsdp",)),
        ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_0'}", ("fsdp", "tensor")),
        ("mesh['axis_0'=2,'axis_1'=4], device_ids=([4,2]T(1,0)) {'axis_0'}", ("tensor",)),
        ("mesh['axis_0'=4,'axis_1'=2], device_ids=(0,4,1,5,2,6,3,7) {'axis_1'}", ("data",)),
    ],
)
def test_groups_of_devices_are_axes_of_the_mesh(groups, axes):
    line = f"  %x = f32[3]{{0}} all-reduce(%a), replica_groups={groups}, to_apply=%s"
    line = f"ENTRY %m (x: f32[3]) -> f32[3] {{\n{line}\n}}"
    assert [one.axes for one in collectives.read(line, CUBE)] == [axes]


def test_the_table_joins_what_is_alike_and_counts_what_runs():
    rows = collectives.table(collectives.read(PROGRAM, CUBE))
    assert rows[0] == ("collective", "over", "type", "inside", "count", "runs a step", "bytes a step, a device")
    assert rows[1:3] == [
        ("all-reduce", "tensor", "bf16", "layers > gqa", "1", "5", "25,600"),
        ("all-gather", "fsdp", "bf16", "layers", "1", "5", "15,360"),
    ]
    assert len(rows) == 7


# ---- what is compiled ----------------------------------------------------------

# Of one sublayer: weights that are gathered over "fsdp"; those of them that "tensor" cuts too and that are multiplied
# with whole, or cut otherwise; activations that are summed over "tensor", forward and backward; parameters with two
# axes that are no weights.
KINDS = {
    "A": (4, 0, 1 + 3, 0),
    "-": (3, 0, 1 + 2, 0),
    "G": (7, 0, 1 + 6, 0),
    "*": (5, 2, 1 + 3, 0),
    "K": (9, 2, 1 + 6, 1),  # dt_bias, [heads, keys]
    "S": (6, 5, 1 + 5, 0),  # z, x, B, C and dt are one weight, which each takes its part of
}
MESHES = ("data", "fsdp", "zero1", "tensor", "cube")
QUICK = [f"{kind}{kind}:{mesh}" for kind in "A-" for mesh in MESHES]
SLOW = [f"{kind}{kind}:{mesh}" for kind in "G*KS" for mesh in MESHES]
CASES = [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]
LENGTH = 56  # of a row: no axis of a weight is a multiple
LAYERS = "accumulation > layers"


@pytest.fixture(scope="module")
def compiled():
    """Of a case; the quick ones are compiled in one process, the others in one for each kind of sublayer."""
    done = {}

    def case(name):
        if name not in done:
            done.update(_run(QUICK if name in QUICK else [case for case in SLOW if case[:2] == name[:2]]))
        return done[name]

    return case


def _run(cases):
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"  # compiles faster
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "tests/collectives_worker.py", *cases]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout)
    for case in found.values():
        case["warned"] = "Involuntary full rematerialization" in run.stderr
    return found


def _counted(found):
    """How many arrays of two axes or more, by kind, mesh axes, loops, type and whether they are activations; what is
    smaller are norms, biases and sums of losses."""
    count = Counter()
    for one in found:
        for kind, shape in one["arrays"]:
            if len(shape) > 1:
                what = "activation" if any(n % LENGTH == 0 for n in shape) else "weight"
                count[one["kind"], "x".join(one["axes"]), one["where"], kind, what] += 1
    return count


def _only(count, **wanted):
    names = ("kind", "over", "where", "type", "what")
    return Counter(
        {key: n for key, n in count.items() if all(key[names.index(name)] in values for name, values in wanted.items())}
    )


@pytest.mark.parametrize("case", CASES)
def test_collectives_of_every_kind_of_sublayer_on_every_mesh(case, compiled):
    """Weights are gathered once forward and once backward, in bf16 and over "fsdp" alone; their gradients are summed
    in fp32, inside the layers over "fsdp" and after the accumulation over "data"; activations are summed over "tensor",
    once a product by rows forward and once a product by columns backward. Nothing else of their size is sent, but for
    the embedding's gradient, and nothing at all in a loop where devices hold copies."""
    pattern, mesh = case.split(":")
    weights, latents, sums, others = KINDS[pattern[0]]
    found = compiled(case)
    assert not found["warned"]
    count, types = _counted(found["compiled"]), _counted(found["partitioned"])
    over_data = {("all-reduce", "data", "-", "f32", "weight"): found["matrices"]}
    over_tensor = {
        ("all-reduce", "tensor", LAYERS, "bf16", "activation"): sums,
        (
            "all-reduce",
            "tensor",
            "accumulation",
            "bf16",
            "activation",
        ): 3,  # the embedding's, its gradient's, the loss's
    }
    if mesh == "data":
        assert count == over_data
        return
    expected = Counter()
    if mesh == "fsdp":
        expected["all-gather", "fsdp", LAYERS, "bf16", "weight"] = 2 * weights
        expected["all-gather", "fsdp", "accumulation", "bf16", "weight"] = 2  # embedding and head
    if mesh in ("fsdp", "zero1"):
        expected["all-reduce", "fsdp", LAYERS, "f32", "weight"] = weights + others
        expected["all-reduce", "fsdp", "accumulation", "f32", "weight"] = 1  # the head's gradient
        # The embedding's is added up where its columns lie: ids and gradients of all rows go there.
        expected["all-gather", "fsdp", "accumulation", "s32", "activation"] = 1
        expected["all-to-all", "fsdp", "accumulation", "bf16", "activation"] = 1
    if mesh == "zero1":
        expected["all-gather", "fsdp", "-", "f32", "weight"] = weights + 2 - (4 if pattern == "SS" else 0)  # new ones
    if mesh == "tensor":
        expected.update({**over_data, **over_tensor})
        if pattern != "SS":
            expected["all-gather", "tensor", LAYERS, "bf16", "weight"] = 2 * latents
    if mesh == "cube":
        expected.update({**over_data, **over_tensor})
        expected["all-gather", "fsdp", LAYERS, "bf16", "weight"] = 2 * (weights - latents)
        expected["all-gather", "fsdpxtensor", LAYERS, "bf16", "weight"] = 2 * latents
        expected["all-gather", "fsdp", "accumulation", "bf16", "weight"] = 2
        expected["all-reduce", "fsdp", LAYERS, "f32", "weight"] = weights + others
        expected["all-reduce", "fsdp", "accumulation", "f32", "weight"] = 2
    if pattern == "SS" and mesh in ("tensor", "cube"):
        # Its joined weight lies by rows and is used by heads: parts of it, of its gradient and of its convolution
        # change places.
        moved = _only(types, kind=["all-to-all", "collective-permute"]) + _only(types, over=["tensor"], what=["weight"])
        assert moved and {key[4] for key in moved} == {"weight"}
        types -= moved
    assert types == +expected
    # The gathers of embedding and head leave the loop, and no activation is sent that the partitioner did not send.
    outside = _only(count, kind=["all-gather"], where=["accumulation"], what=["weight"], over=["fsdp"])
    assert not outside
    assert _only(count, what=["activation"]).keys() == {
        (kind, over, where, "f32" if kind_of == "bf16" else kind_of, what)
        for kind, over, where, kind_of, what in _only(types, what=["activation"])
    }
    inner = [one for one in found["compiled"] if one["where"] == LAYERS]
    assert inner and {one["times"] for one in inner} == {4}  # two accumulation steps of two layers
