"""Config dataclasses: conversion, types, every check with its one-line message, and the published configs."""

import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import ml_collections
import pytest

from hybrid_jax import config as config_lib
from hybrid_jax import config_checks, config_file, flops, planner, recipes
from hybrid_jax.config import Config, GDNConfig, ModelConfig, default_config
from hybrid_jax.errors import UserError

CONFIGS = Path(__file__).parent.parent / "configs"
TINY = CONFIGS / "tiny_hybrid.py"


def resolved(*overrides: tuple[str, str], path: Path = TINY) -> Config:
    return config_file.load(str(path), overrides)


def message(*overrides: tuple[str, str], path: Path = TINY) -> str:
    with pytest.raises(UserError) as error:
        resolved(*overrides, path=path)
    text = str(error.value)
    assert "\n" not in text
    return text


def test_importing_the_configuration_does_not_import_jax():
    code = (
        "import sys, hybrid_jax.config_file, hybrid_jax.pattern, hybrid_jax.flops, hybrid_jax.report, "
        "hybrid_jax.platform, hybrid_jax.recipes; print('jax' in sys.modules)"
    )
    root = Path(__file__).parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True).stdout == "False\n"


def test_round_trip_through_dicts_and_json():
    config = resolved(("train.steps", "7"), ("data.path", "a b"), ("data.source", "files"))
    again = config_lib.resolve(json.loads(json.dumps(config_lib.to_dict(config))))
    assert again == config
    assert hash(again.model) == hash(config.model)


def test_the_default_config_is_the_dataclasses():
    assert config_lib.from_dict(default_config().to_dict()) == Config()


def test_no_key_is_none_and_every_key_says_what_it_means():
    for path, field in config_lib.fields():
        assert isinstance(field.default, field.type), path
        assert field.metadata["help"], path
        assert not field.metadata["choices"] or field.default in field.metadata["choices"], path


def test_missing_sections_and_keys_take_their_own_defaults():
    config = config_lib.from_dict({"model": {"gqa": {"rope": {"theta": 5.0}}}})
    assert config.model.gqa.rope.style == "half"  # RopeConfig's own default is interleaved
    assert config.model.gqa.rope.theta == 5.0
    assert config.model.mla.rope.style == "interleaved"


def test_an_int_may_stand_for_a_float_and_nothing_else_converts():
    config = default_config()
    config.optimizer.learning_rate = 1
    rate = config_lib.from_dict(config.to_dict()).optimizer.learning_rate
    assert rate == 1.0
    assert isinstance(rate, float)
    for value, words in [
        (1.0, "a whole number"),
        ("1", "a whole number"),
        (True, "a whole number"),
        (None, "instead of None"),
    ]:
        with pytest.raises(UserError, match=f"config.train.steps: expected .*{words}"):
            config_lib.from_dict({"train": {"steps": value}})
    with pytest.raises(UserError, match=r"config\.train: expected a section with keys, got 3"):
        config_lib.from_dict({"train": 3})


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("model.pattern_", "config.model.pattern_: unknown key, did you mean 'pattern'?"),
        ("model.gdn.nun_heads", "config.model.gdn.nun_heads: unknown key, did you mean 'num_heads'?"),
        ("models.pattern", "config.models: unknown key, did you mean 'model'?"),
        ("steps", "config.steps: unknown key, did you mean 'config.train.steps'?"),
        ("train.zzz", "config.train.zzz: unknown key, valid keys are steps, global_batch_size"),
        ("model", "config.model: is a section; set one of its keys, as in --config.model.KEY=VALUE"),
        ("workdir.x", "config.workdir: is a value and has no key 'x'"),
    ],
)
def test_unknown_keys_on_the_command_line(key, words):
    assert message((key, "1")).startswith(words)


@pytest.mark.parametrize(
    ("pattern", "remat", "layers", "words"),
    [
        ("M-M-M-*", "full", "4", "config.model.remat_layers: 4, but the stack has 3 periods (G-); use 0 to 3, or -1"),
        ("M-M-M-*", "full", "-2", "config.model.remat_layers: -2, but the stack has 3 periods (G-); use 0 to 3, or -1"),
        ("M-*K", "dots", "2", "config.model.remat_layers: 2, but the stack has 1 period (G-*K); use 0 to 1, or -1"),
        ("M-M-", "none", "1", "config.model.remat_layers: 1, but config.model.remat is none, so nothing is recomputed"),
    ],
)
def test_periods_to_recompute_that_there_are_not(pattern, remat, layers, words):
    overrides = (("model.pattern", pattern), ("model.remat", remat), ("model.remat_layers", layers))
    assert message(*overrides).startswith(words)


def test_periods_to_recompute():
    def sublayers(remat, layers, scan="true"):
        keys = (("pattern", "M-M-M-*"), ("remat", remat), ("remat_layers", layers), ("scan_layers", scan))
        return resolved(*((f"model.{key}", value) for key, value in keys)).model.recomputed_sublayers

    assert [sublayers("full", k) for k in ("0", "1", "3", "-1")] == [0, 2, 6, 7]
    assert sublayers("names", "2", "false") == 4
    assert sublayers("none", "-1") == sublayers("none", "0") == 0


def test_unknown_keys_in_a_config_are_found_too():
    config = default_config()
    config.model.pattern_ = "M-"
    with pytest.raises(UserError, match=r"config\.model\.pattern_: unknown key, did you mean 'pattern'\?"):
        config_lib.resolve(config)


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        (
            "model.mixer",
            "mamba",
            "config.model.mixer: 'mamba' is not one of gdn, kda, mamba2, did you mean 'mamba2'?",
        ),
        ("model.remat", "ful", "did you mean 'full'?"),
        ("model.remat_layers", "2.5", "config.model.remat_layers: expected a whole number, got '2.5'"),
        ("kernels.backend", "pallas", "config.kernels.backend: 'pallas' is not one of auto, reference"),
        ("train.steps", "many", "config.train.steps: expected a whole number, got 'many'"),
        ("train.steps", "1.5", "config.train.steps: expected a whole number, got '1.5'"),
        ("optimizer.b1", "x", "config.optimizer.b1: expected a number, got 'x'"),
        (
            "data.isolate_documents",
            "maybe",
            "config.data.isolate_documents: expected true or false, got 'maybe'",
        ),
    ],
)
def test_values_of_the_wrong_kind(key, text, words):
    assert words in message((key, text))


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"model.pattern": "*-M?"}, "config.model.pattern"),
        ({"model.pattern": "M-", "model.num_layers": "4"}, "config.model.num_layers"),
        ({"model.pattern": "", "model.num_layers": "5"}, "config.model.num_layers"),
        ({"model.vocab_size": "0"}, "config.model.vocab_size"),
        ({"model.hidden_size": "-8"}, "config.model.hidden_size"),
        ({"model.intermediate_size": "0"}, "config.model.intermediate_size"),
        ({"model.norm_eps": "0"}, "config.model.norm_eps"),
        ({"model.norm_eps": "nan"}, "config.model.norm_eps"),
        ({"model.z_loss": "-1"}, "config.model.z_loss"),
        ({"model.mla.kv_lora_rank": "0"}, "config.model.mla.kv_lora_rank"),
        ({"model.mla.qk_rope_head_dim": "15"}, "config.model.mla.qk_rope_head_dim"),
        (
            {"model.mla.qk_rope_head_dim": "0", "model.mla.qk_nope_head_dim": "0"},
            "config.model.mla.qk_nope_head_dim",
        ),
        ({"model.mla.rope.yarn_factor": "0.5"}, "config.model.mla.rope.yarn_factor"),
        ({"model.mla.rope.yarn_factor": "4"}, "config.model.mla.rope.yarn_original_max_position"),
        ({"model.gqa.rope.llama3_factor": "0.5"}, "config.model.gqa.rope.llama3_factor"),
        ({"model.gqa.rope.llama3_factor": "8"}, "config.model.gqa.rope.llama3_original_max_position"),
        (
            {
                "model.gqa.rope.llama3_factor": "8",
                "model.gqa.rope.llama3_original_max_position": "8192",
                "model.gqa.rope.llama3_low_rotations": "4",
            },
            "config.model.gqa.rope.llama3_high_rotations",
        ),
        (
            {
                f"model.gqa.rope.{kind}_{key}": value
                for kind in ("llama3", "yarn")
                for key, value in (("factor", "8"), ("original_max_position", "8192"))
            },
            "config.model.gqa.rope.llama3_factor",
        ),
        ({"model.gqa.num_kv_heads": "3"}, "config.model.gqa.num_heads"),
        ({"model.gqa.head_dim": "31"}, "config.model.gqa.head_dim"),
        ({"model.gqa.rope.rotary_fraction": "0.3"}, "config.model.gqa.head_dim"),
        ({"model.gqa.rope.rotary_fraction": "1.5"}, "config.model.gqa.rope.rotary_fraction"),
        ({"model.gdn.num_heads": "3"}, "config.model.gdn.num_v_heads"),
        ({"model.gdn.expand_v": "1.03"}, "config.model.gdn.expand_v"),
        ({"model.gdn.conv_size": "0"}, "config.model.gdn.conv_size"),
        ({"model.kda.num_v_heads": "6"}, "config.model.kda.num_v_heads"),
        ({"model.kda.lower_bound": "-6"}, "config.model.kda.lower_bound"),
        ({"model.kda.lower_bound": "1"}, "config.model.kda.lower_bound"),
        ({"model.mamba2.head_dim": "48"}, "config.model.mamba2: hidden_size * expand"),
        ({"model.mamba2.n_groups": "3"}, "config.model.mamba2: heads"),
        ({"model.mamba2.state_size": "-1"}, "config.model.mamba2.state_size"),
        ({"train.steps": "0"}, "config.train.steps"),
        ({"train.sequence_length": "0"}, "config.train.sequence_length"),
        ({"train.global_batch_size": "-8"}, "config.train.global_batch_size"),
        ({"train.micro_batch_size": "16"}, "config.train.micro_batch_size"),
        ({"train.seed": "-1"}, "config.train.seed"),
        ({"divergence.max_rollbacks": "-1"}, "config.divergence.max_rollbacks"),
        ({"divergence.window": "0"}, "config.divergence.window"),
        ({"divergence.width": "0"}, "config.divergence.width"),
        ({"train.profile_steps": "10"}, "config.train.profile_steps"),
        ({"train.profile_steps": "13:10"}, "config.train.profile_steps"),
        ({"train.profile_steps": "0:3"}, "config.train.profile_steps"),
        ({"train.profile_steps": "601:603"}, "config.train.profile_steps"),
        ({"train.sequence_length": "4194304"}, "config.train.sequence_length"),
        ({"model.pattern": "*-", "train.sequence_length": "5000000"}, "config.train.sequence_length"),
        ({"kernels.backend": "triton"}, "config.kernels.backend"),  # S has no such kernels
        ({"kernels.backend": "triton", "model.pattern": "*-S-"}, "config.kernels.backend"),
        ({"kernels.backend": "triton", "model.pattern": "G-", "model.gdn.head_dim": "12"}, "config.kernels.backend"),
        ({"kernels.backend": "triton", "model.pattern": "G-", "model.gdn.expand_v": "64"}, "config.kernels.backend"),
        ({"kernels.backend": "triton", "model.pattern": "K-", "model.kda.head_dim": "12"}, "config.kernels.backend"),
        ({"kernels.backend": "triton", "model.pattern": "K-", "model.kda.expand_v": "64"}, "config.kernels.backend"),
        ({"optimizer.learning_rate": "0"}, "config.optimizer.learning_rate"),
        ({"optimizer.min_learning_rate": "1"}, "config.optimizer.min_learning_rate"),
        ({"optimizer.warmup_steps": "601", "optimizer.decay_steps": "600"}, "config.optimizer.warmup_steps"),
        ({"optimizer.warmup_steps": "601", "optimizer.decay_steps": "0"}, "config.optimizer.warmup_steps"),
        ({"optimizer.b2": "1"}, "config.optimizer.b2"),
        ({"optimizer.weight_decay": "-0.1"}, "config.optimizer.weight_decay"),
        ({"data.source": "files"}, "config.data.path"),
        ({"data.validation_fraction": "1"}, "config.data.validation_fraction"),
        ({"data.validation_fraction": "0"}, "config.data.validation_fraction: 0 holds nothing out for the"),
        ({"data.validation_path": "x"}, "config.data.validation_path: 'x', but data.source"),
        ({"data.tokenizer": "bpe", "data.bpe_vocab_size": "256"}, "config.data.bpe_vocab_size"),
        ({"eval.batches": "-1"}, "config.eval.batches"),
        ({"checkpoint.keep": "0"}, "config.checkpoint.keep"),
        ({"log.every_steps": "0"}, "config.log.every_steps"),
        ({"mesh.data": "0"}, "config.mesh.data"),
        ({"mesh.fsdp": "0"}, "config.mesh.fsdp"),
        ({"mesh.tensor": "-1"}, "config.mesh.tensor"),
        ({"mesh.tensor": "7"}, "config.mesh.tensor: 7 devices cannot share config.model.vocab_size"),
        ({"mesh.zero": "2"}, "config.mesh.zero: 2 is neither"),
    ],
)
def test_impossible_sizes_name_the_key(overrides, key):
    # steps are pinned, so that the message under test does not depend on how long the demo trains
    found = message(("train.steps", "600"), ("train.global_batch_size", "8"), *overrides.items())
    assert found.startswith(key + (":" if " " not in key else "")), found


def test_what_the_checks_leave_alone():
    for steps in ("5:5", "600:600", "599:700"):
        assert resolved(("train.steps", "600"), ("train.profile_steps", steps)).train.profile_steps == steps
    assert "train.steps 480" in message(("train.steps", "480"), ("train.profile_steps", "900:903"))
    for backend in ("auto", "reference", "chunked"):
        assert resolved(("kernels.backend", backend)).kernels.backend == backend
        assert resolved(("kernels.attention", backend)).kernels.attention == backend
    for op, name in (("G", "gdn"), ("K", "kda")):
        unfit = message(("kernels.backend", "triton"), ("model.pattern", f"{op}-"), (f"model.{name}.head_dim", "12"))
        assert f"triton cannot run model.{name}: heads of 12 key dims" in unfit
    for pattern in ("*-G-A-", "*-K-A-G-"):
        assert resolved(("kernels.backend", "triton"), ("model.pattern", pattern)).kernels.attention == "auto"
    assert resolved(("train.sequence_length", "4194303")).train.sequence_length == 4_194_303
    without_positions = [
        (("model.pattern", "GKS-"),),
        (("model.mla.rope.style", "none"), ("model.gqa.rope.style", "none")),
        (("model.pattern", "*-"), ("model.mla.qk_rope_head_dim", "0")),
    ]
    for overrides in without_positions:
        assert resolved(*overrides, ("train.sequence_length", "9000000")).train.sequence_length == 9_000_000


def test_the_longest_row_is_where_the_rotary_tables_end():
    from hybrid_jax.layers import rotary

    assert config_checks.MAX_LENGTH == rotary._LOW * rotary._HIGH


def test_sections_that_the_stack_does_not_use_may_be_empty():
    model = ModelConfig(
        pattern="G-",
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        gdn=GDNConfig(num_heads=1, num_v_heads=1, head_dim=4),
    )
    config_lib.resolve(config_lib.to_dict(dataclasses.replace(Config(), model=model)))
    with pytest.raises(UserError, match=r"config\.model\.kda\.num_heads: must be positive, got 0"):
        config_lib.resolve(
            config_lib.to_dict(
                dataclasses.replace(Config(), model=dataclasses.replace(model, mixer="kda", pattern="M-"))
            )
        )


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.py")))
def test_a_run_cut_short_keeps_the_schedule_of_the_whole_one(name):
    whole, short = (resolved(*steps, path=CONFIGS / f"{name}.py") for steps in ((), (("train.steps", "1"),)))
    assert short.optimizer == whole.optimizer
    assert whole.optimizer.decay_steps == whole.train.steps


@pytest.mark.parametrize(
    ("overrides", "devices", "processes", "words"),
    [
        (
            {},
            3,
            1,
            "config.train.global_batch_size: 8 rows do not divide over 3 devices; use a multiple of 3",
        ),
        ({"mesh.data": "2"}, 4, 1, "config.mesh.data: 2 x fsdp 1 x tensor 1 does not make 4 devices; set mesh.data"),
        (
            {"mesh.fsdp": "8"},
            4,
            1,
            "config.mesh.fsdp: 8 does not divide 4 devices; use 1, 2, 4, or a multiple of 8 devices",
        ),
        ({"mesh.fsdp": "4"}, 1, 1, "config.mesh.fsdp: 4 does not divide 1 device; use 1, or a multiple of 4 devices"),
        ({"mesh.tensor": "2"}, 1, 1, "config.mesh.tensor: 2 does not divide 1 device; use 1, or a multiple of 2"),
        (
            {"mesh.fsdp": "4", "mesh.tensor": "2"},
            12,
            1,
            "config.mesh.fsdp: 4 x tensor 2 does not divide 12 devices; use 1, 2, 3, 4, 6, 12 for their product, or a",
        ),
        # Its heads can be cut in two.
        (
            {},
            64,
            1,
            "8 rows do not divide over 64 devices; use a multiple of 64, such as 64; with config.mesh.tensor=2, "
            "a multiple of 32, such as 32",
        ),
        (
            {"mesh.fsdp": "2"},
            16,
            1,
            "8 rows do not divide over 16 devices; use a multiple of 16, such as 16, or config.mesh.tensor=2",
        ),
        (
            {"train.micro_batch_size": "2"},
            16,
            1,
            "a multiple of 32, such as 32; with config.mesh.tensor=2, a multiple of 16, such as 16",
        ),
        ({"mesh.data": "16"}, 16, 1, "8 rows do not divide over 16 devices; use a multiple of 16, such as 16"),
        ({"mesh.tensor": "2"}, 64, 1, "8 rows do not divide over 32 devices; use a multiple of 32, such as 32"),
        (
            {"train.micro_batch_size": "3"},
            2,
            1,
            "config.train.micro_batch_size: 3 does not divide the 4 rows of a device (8 over 2); use 2",
        ),
        ({}, 4, 3, "--num_processes: 4 devices do not divide over 3 processes"),
    ],
)
def test_a_batch_that_does_not_divide_over_the_devices(overrides, devices, processes, words):
    config = resolved(("train.global_batch_size", "8"), *overrides.items())
    with pytest.raises(UserError) as error:
        config_lib.check_devices(config, devices, processes)
    assert words in str(error.value)


def test_a_batch_that_divides_passes():
    config = resolved(("train.global_batch_size", "8"), ("train.micro_batch_size", "2"))
    for devices, processes in [(1, 1), (2, 2), (4, 1), (4, 4)]:
        config_lib.check_devices(config, devices, processes)


def test_norm_eps_is_inherited_unless_set():
    model = resolved(("model.norm_eps", "1e-5"), ("model.gdn.norm_eps", "1e-3")).model
    assert model.norm_eps_of(model.mla) == 1e-5
    assert model.norm_eps_of(model.gdn) == 1e-3
    assert model.norm_eps_of(model.mamba2) == 1e-5


# ---- config files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "import nothing_of_this_name\n",
            "line 1: ModuleNotFoundError: No module named 'nothing_of_this_name'",
        ),
        ("x = 1\ndef get_config(:\n", "line 2: invalid syntax"),
        ("x = 1\n", "has no get_config()"),
        ("def get_config(variant=''):\n    return 3\n", "its get_config() returned int, not a ConfigDict"),
        (
            "from hybrid_jax.config import default_config\n"
            "def get_config(variant=''):\n    c = default_config()\n    c.models.mixer = 'gdn'\n",
            "line 4: AttributeError",
        ),
        ("def get_config(variant=''):\n    raise ValueError('one\\ntwo')\n", "line 2: ValueError: one"),
    ],
)
def test_a_broken_config_file_names_itself_and_the_line(tmp_path, body, words):
    path = tmp_path / "broken.py"
    path.write_text(body)
    found = message(path=path)
    assert found.startswith(str(path))
    assert words in found


def test_variants_that_are_not_there(tmp_path):
    with pytest.raises(UserError, match=r"gdn_300m\.py: variant 'smok' is not known; there is only 'smoke'"):
        config_file.load(f"{CONFIGS / 'gdn_300m.py'}:smok")
    path = tmp_path / "plain.py"
    path.write_text("def get_config():\n    return 0\n")
    with pytest.raises(UserError, match="takes no variant, so leave out ':smoke'"):
        config_file.load(f"{path}:smoke")


def test_a_missing_file_suggests_one_that_is_there():
    assert message(path=CONFIGS / "gdn_30m.py").endswith(f"did you mean {CONFIGS / 'gdn_300m.py'}?")


def test_the_workdir_follows_the_file_and_the_variant():
    assert resolved().workdir == "runs/tiny_hybrid"
    assert config_file.load(f"{TINY}:smoke").workdir == "runs/tiny_hybrid-smoke"
    assert resolved(("workdir", "/x")).workdir == "/x"
    shared = [("workspace", "/shared/runs"), ("group", "hybrids"), ("user", "ada")]
    assert resolved(*shared).workdir == "/shared/runs/hybrids/ada/tiny_hybrid"
    assert resolved(*shared[::2]).workdir == "/shared/runs/ada/tiny_hybrid"
    assert resolved(*shared, ("workdir", "/x")).workdir == "/x"


def test_a_path_that_is_given_alone_is_read(tmp_path):
    """And not left aside for the text that a config, or its smoke variant, would train on without it."""
    store, smoke = str(tmp_path / "corpus"), f"{CONFIGS / 'gdn_300m.py'}:smoke"
    assert config_file.load(smoke).data.source == "python"
    for path, source in [
        (store, "store"),
        (f"{store}:0.7,{store}2:0.3", "store"),
        (str(tmp_path), "files"),
        (f"{tmp_path}/**/*.txt", "files"),
        ("", "python"),
    ]:
        found = config_file.load(smoke, [("data.path", path)]).data
        assert (found.path, found.source) == (path, source)
    said = message(("data.path", store), ("data.source", "python"))
    assert "config.data.path" in said and "data.source 'python' has its own text" in said


def test_loading_a_config_leaves_no_bytecode(tmp_path):
    path = tmp_path / "c.py"
    path.write_text("from hybrid_jax.recipes import *\ndef get_config():\n    return family_300m()\n")
    message(path=path)  # no pattern
    assert [file.name for file in tmp_path.iterdir()] == ["c.py"]


# ---- the published configs ---------------------------------------------------------------------------------

NAMES = sorted(path.stem for path in CONFIGS.glob("*.py"))
DENSE = ["llama3_8b", "llama3_70b", "llama3_405b", "qwen2_5_7b", "qwen3_1_7b"]


def test_every_published_run_is_there():
    assert set(NAMES) == {
        "gdn_300m", "kda_300m", "hybrid_gdn_300m", "hybrid_mamba2_300m",
        "gdn_1b", "kda_1b", "hybrid_gdn_1b", "hybrid_kda_1b", "hybrid_mamba2_1b",
        "hybrid_mamba2_3b", "hybrid_mamba2_8b", "mamba2_370m", "tiny_hybrid",
        "kimi_linear_300m",  # of our own: one that a released class holds
        *DENSE,
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_smoke_variant_is_the_same_model_in_a_few_small_steps(name):
    full, smoke = (config_file.load(f"{CONFIGS / name}.py{variant}") for variant in ("", ":smoke"))
    assert smoke.model == full.model
    assert smoke.train.steps <= 10
    assert smoke.train.global_batch_size * smoke.train.sequence_length <= 1024
    for devices in (1, 8, full.mesh.fsdp * full.mesh.tensor):
        config_lib.check_devices(recipes.smoke_on(smoke, devices), devices)
    assert smoke.mesh == dataclasses.replace(full.mesh, data=-1)
    assert recipes.smoke_on(smoke, devices) is smoke
    assert smoke.data.source == "python"
    assert smoke.data.tokenizer == "bytes"
    assert smoke.model.vocab_size >= 259
    assert smoke.optimizer.warmup_steps <= 1  # so that --config.train.steps=1 is valid too
    if name != "tiny_hybrid":
        assert full.data.source == "store" and full.data.path == ""
        sample = (
            "10BT" if full.train.steps * full.train.global_batch_size * full.train.sequence_length < 2e10 else "100BT"
        )
        assert full.data.prepare.startswith(f"--dataset HuggingFaceFW/fineweb-edu:sample-{sample} --tokenizer ")


@pytest.mark.parametrize(
    ("name", "devices", "rows_at_once", "kind"),
    [
        ("qwen3_1_7b", 8, 4, "qwen3"),
        ("qwen2_5_7b", 64, 10, "qwen2"),
        ("llama3_8b", 64, 2, "llama"),
        ("llama3_70b", 128, 1, "llama"),
        ("llama3_405b", 2048, 1, "llama"),
    ],
)
def test_dense_baselines_are_released_models_on_meshes_that_divide(name, devices, rows_at_once, kind):
    """Their recipes run unchanged from the fewest devices that make their mesh to `devices`."""
    from hybrid_jax.interop import formats

    config = config_file.load(f"{CONFIGS / name}.py")
    assert formats.choose(config).name == kind
    train, mesh = config.train, config.mesh
    assert train.micro_batch_size == rows_at_once
    least = mesh.fsdp * mesh.tensor
    for count in (least, devices):
        config_lib.check_devices(config, count)
    assert train.steps * train.global_batch_size * train.sequence_length == pytest.approx(1e11, rel=1e-5)
    state = {1: 4 + 12 / mesh.fsdp, 3: 16 / mesh.fsdp}[mesh.zero] / mesh.tensor * flops.parameter_count(config.model)
    text = (CONFIGS / f"{name}.py").read_text()
    assert re.search(rf"\b{state / 2**30:.0f}\s(of|GiB)", text), state / 2**30  # as the docstring says
    assert planner.fits(config, planner.mesh_of(config), planner.GPUS[0])  # a MI300X


# (steps, rows, length, peak, minimum, warm-up, weight decay)
RECIPES = {
    **dict.fromkeys(
        ["gdn_300m", "kda_300m", "hybrid_gdn_300m", "hybrid_mamba2_300m", "kimi_linear_300m"],
        (4768, 1024, 2048, 2e-4, 2e-5, 200, 0.01),
    ),
    **dict.fromkeys(
        ["gdn_1b", "kda_1b", "hybrid_gdn_1b", "hybrid_kda_1b", "hybrid_mamba2_1b"],
        (95_368, 512, 2048, 3e-4, 3e-5, 2000, 0.01),
    ),
    **dict.fromkeys(
        ["hybrid_mamba2_3b", "hybrid_mamba2_8b"], (95_368, 128, 8192, 2e-4, 2e-5, 2000, 0.1)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name):
    config = config_file.load(f"{CONFIGS / name}.py")
    train, optimizer = config.train, config.optimizer
    steps, rows, length, peak, low, warmup, decay = RECIPES[name]
    assert (train.steps, train.global_batch_size, train.sequence_length) == (steps, rows, length)
    assert (train.seed, train.compute_dtype, config.model.norm_eps) == (42, "bfloat16", 1e-6)
    assert optimizer.learning_rate == peak
    assert math.isclose(optimizer.min_learning_rate, low)
    assert (optimizer.warmup_steps, optimizer.decay_steps, optimizer.weight_decay) == (warmup, steps, decay)
    assert (optimizer.b1, optimizer.b2, optimizer.eps, optimizer.clip_norm) == (0.9, 0.95, 1e-8, 1.0)
    tokens = steps * rows * length
    assert tokens == pytest.approx(1e10 if "300m" in name else 1e11, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "rows_at_once", "gpu"), [("hybrid_mamba2_3b", 4, "MI300X"), ("hybrid_mamba2_8b", 2, "MI300X")]
)
def test_large_hybrids_fit_as_they_are(name, rows_at_once, gpu):
    """With ZeRO-1 and the micro batch of the published trials; and so they do on 1,024 devices, with more rows."""
    config = config_file.load(f"{CONFIGS / name}.py")
    assert (config.mesh.fsdp, config.mesh.zero, config.train.micro_batch_size) == (8, 1, rows_at_once)
    (gpu,) = [found for found in planner.GPUS if found.name == gpu]
    assert planner.fits(config, planner.mesh_of(config), gpu)
    many = config_file.load(
        f"{CONFIGS / name}.py", [("mesh.tensor", "4"), ("train.global_batch_size", str(256 * rows_at_once))]
    )
    config_lib.check_devices(many, 1024)
    state = (4 + 12 / config.mesh.fsdp) * flops.parameter_count(config.model) / 2**30
    assert f" {state:.0f} of " in (CONFIGS / f"{name}.py").read_text()


@pytest.mark.parametrize(
    ("name", "mixer", "sibling"),
    [
        ("gdn_300m", "kda", "kda_300m"),
        ("kda_300m", "gdn", "gdn_300m"),
        ("hybrid_gdn_300m", "mamba2", "hybrid_mamba2_300m"),
        ("gdn_1b", "kda", "kda_1b"),
        ("hybrid_gdn_1b", "kda", "hybrid_kda_1b"),
        ("hybrid_kda_1b", "mamba2", "hybrid_mamba2_1b"),
        ("hybrid_mamba2_1b", "gdn", "hybrid_gdn_1b"),
    ],
)
def test_swapping_the_mixer_gives_the_sibling(name, mixer, sibling):
    swapped = resolved(("model.mixer", mixer), path=CONFIGS / f"{name}.py")
    other = resolved(path=CONFIGS / f"{sibling}.py")
    assert dataclasses.replace(swapped, workdir="") == dataclasses.replace(other, workdir="")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in DENSE])
@pytest.mark.parametrize("mixer", ["gdn", "kda", "mamba2"])
def test_every_config_is_valid_with_every_mixer(name, mixer):
    config = resolved(("model.mixer", mixer), path=CONFIGS / f"{name}.py")
    explicit = config.model.layout
    assert {"gdn": "G", "kda": "K", "mamba2": "S"}[mixer] in explicit
    with_every_kind = resolved(("model.pattern", "*-GKSA"), path=CONFIGS / f"{name}.py")
    assert with_every_kind.model.layout == "*-GKSA"


def test_the_tiny_hybrid_has_every_kind_of_sublayer():
    config = resolved()
    assert config.model.pattern == "*-M-G-K-S-A-"
    assert config.model.mixer == "gdn"
    assert set(config.model.layout) == set("*-GKSA")


def test_a_config_dict_of_plain_keys_resolves():
    config = ml_collections.ConfigDict(config_lib.to_dict(resolved()))
    assert config_lib.resolve(config) == resolved()
