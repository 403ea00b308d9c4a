"""Trains a model: python launch.py --config=configs/gdn_300m.py [--config.train.steps=100 ...]

`python launch.py --help` lists the flags and every config key. Mistakes end in one line on stderr and exit
code 2.
"""

import dataclasses
import difflib
import os
import re
import sys
import traceback
from pathlib import Path

from hybrid_jax import signals

if __name__ == "__main__":
    signals.AT_ONCE.listen()

try:
    from absl import flags

    from hybrid_jax import cluster, command, config_file, gemm_cache, platform, supervisor
    from hybrid_jax.config import Config, fields
    from hybrid_jax.errors import UserError
    from hybrid_jax.rank_logs import RankLogs
except ModuleNotFoundError as error:
    print(
        f"error: {error.name} is not installed for {sys.executable}; run `make setup` and use .venv/bin/python, or "
        "`pip install -e .` for this one",
        file=sys.stderr,
    )
    raise SystemExit(2) from None

_USAGE = """\
usage: python launch.py --config=configs/NAME.py[:smoke] [--config.KEY=VALUE ...] [flags]

  python launch.py --config=configs/tiny_hybrid.py                  a small model on this machine, in minutes
  python launch.py --config=configs/gdn_300m.py:smoke               a published model, a few small steps
  python launch.py --config=configs/gdn_300m.py --config.model.mixer=kda --dry_run

Stopped runs go on where they were when started again with the same workdir.
"""


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line, parsed."""

    flags: flags.FlagValues
    overrides: tuple[tuple[str, str], ...]


def _define() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_string("config", "", "the config file, and a variant after a colon", flag_values=values)
    flags.DEFINE_enum(
        "dry_run",
        None,
        ["report", "compile"],
        "print sizes and costs only; =compile compiles the step too",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "virtual_devices",
        0,
        "with --dry_run=compile: compile for so many devices, on this machine's CPU",
        flag_values=values,
        lower_bound=0,
    )
    flags.DEFINE_enum(
        "platform",
        None,
        list(platform.REQUESTS),
        "default: JAX_PLATFORMS, else a GPU if there is one",
        flag_values=values,
    )
    flags.DEFINE_string(
        "coordinator_address", "", "HOST:PORT of process 0 (or JAX_COORDINATOR_ADDRESS)", flag_values=values
    )
    flags.DEFINE_integer("num_processes", None, "processes of the run (or JAX_NUM_PROCESSES)", flag_values=values)
    flags.DEFINE_integer("process_id", None, "this process's number (or JAX_PROCESS_ID)", flag_values=values)
    flags.DEFINE_string(
        "local_device_ids", "", "this process's GPUs, as 0,1, or all (or JAX_LOCAL_DEVICE_IDS)", flag_values=values
    )
    flags.DEFINE_integer(
        "expected_devices",
        0,
        "devices of the whole run; another number is an error; --dry_run plans for so many",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "heartbeat_seconds", 30, "after which a silent process of several counts as gone", flag_values=values
    )
    flags.DEFINE_integer("join_seconds", 600, "longest that processes wait for each other to start", flag_values=values)
    flags.DEFINE_string(
        "requeue_file", "", "made where a run of several processes ends to be started again", flag_values=values
    )
    flags.DEFINE_bool("help", False, "this text", short_name="h", flag_values=values)
    return values


def parse(arguments: list[str]) -> Options:
    """Splits `--config.KEY=VALUE` from the flags. Raises UserError for anything that is neither."""
    plain, overrides = config_file.split_overrides(arguments)
    plain = ["--dry_run=report" if argument in ("--dry_run", "-dry_run") else argument for argument in plain]
    values = _define()
    try:
        left_over = values(["launch.py", *plain])[1:]
    except flags.UnrecognizedFlagError as error:
        raise UserError(f"--{error.flagname}: unknown flag{_similar_flag(error.flagname, list(values))}") from None
    except flags.Error as error:
        text = re.sub(r"flag (--\w+)=(.*): invalid literal.*", r"\1: expected a whole number, got '\2'", str(error))
        raise UserError(text) from None
    if left_over:
        raise UserError(f"{left_over[0]!r}: not a flag; config keys are set as --config.KEY=VALUE")
    return Options(values, tuple(overrides))


def _similar_flag(name: str, known: list[str]) -> str:
    keys = [f"config.{path}" for path, _ in fields()]
    for candidate in (f"config.{name}", *(key for key in keys if key.endswith(f".{name}"))):
        if candidate in keys:
            return f", did you mean --{candidate}?"
    near = difflib.get_close_matches(name, [*known, *keys], n=1)
    return f", did you mean --{near[0]}?" if near else "; see --help"


def help_text() -> str:
    """Usage, flags, and every config key with its default and meaning."""
    lines = [_USAGE, "flags"]
    values = _define()
    lines += [f"  --{name:<21} {values[name].help}" for name in sorted(values) if len(name) > 1]
    lines += ["", f"{'--config.KEY=VALUE':<34} {'default':<11} meaning [choices]"]
    for path, field in fields():
        if path.startswith("model.gqa.rope."):
            if path.endswith("style"):
                lines.append(f"  {'model.gqa.rope.*':<32} {'':<11} as model.mla.rope.*, but style half")
            continue
        choices = f" [{', '.join(field.metadata['choices'])}]" if field.metadata["choices"] else ""
        default = "''" if field.default == "" else str(field.default)
        lines.append(f"  {path:<32} {default:<11} {field.metadata['help']}{choices}")
    return "\n".join(lines)


def run(arguments: list[str], supervise: bool = False) -> int:
    """Everything `python launch.py` does; returns the exit code. Raises UserError.

    supervise: whether to run a trainer of several as another process (see supervisor.py) and not in this one.
    """
    options = parse(arguments)
    values = options.flags
    if values.help:
        _show(help_text())
        return 0
    if not values.config:
        raise UserError("--config: missing; give a config file, as in --config=configs/tiny_hybrid.py (see --help)")
    if values.virtual_devices and (values.dry_run != "compile" or values.platform not in (None, "cpu")):
        raise UserError(
            "--virtual_devices: they can be compiled for and nothing else; use it with --dry_run=compile and without "
            "--platform"
        )
    config = config_file.load(values.config, options.overrides)
    signals.AT_ONCE.requeue_exit_code = config.train.requeue_exit_code
    if values.dry_run == "report":
        from hybrid_jax import data, report

        if values.expected_devices:
            _at_least(values, "expected_devices", 0)
            config = report.on_devices(_for_devices(config, options, values.expected_devices), values.expected_devices)
        found = data.dry_run(config)  # first: a mistake is to be one line and nothing else
        _show(f"{report.dry_run(config)}\n\n{found}")
        return 0
    group = None if values.virtual_devices else find_group(values)
    if group and supervise:
        logs = RankLogs(Path(config.workdir).expanduser() / "logs", group.index)
        code = supervisor.run([sys.executable, os.path.abspath(__file__), *arguments], group, logs)
        if values.requeue_file and code == config.train.requeue_exit_code:
            Path(values.requeue_file).touch()
        return code
    start_devices(values, group, config.tune.gemm_cache)
    from hybrid_jax.kernels import dispatch

    dispatch.check(config.kernels.backend)
    import jax

    config = _for_devices(config, options, jax.device_count())
    if values.dry_run == "compile":  # allocates no parameters, so the next check is not for it
        return compile_only(config)
    if config_file.split(values.config)[1] == "smoke":
        from hybrid_jax import report

        report.check_memory(config)
    from hybrid_jax import train

    train.run(config)
    return 0


def _show(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError as error:
        if code := command.unprinted(error):
            raise SystemExit(code) from None


def find_group(values: flags.FlagValues) -> cluster.Group | None:
    """The processes that make this run, None for one alone. Raises UserError."""
    for name, least in (("expected_devices", 0), ("heartbeat_seconds", 5), ("join_seconds", 1)):
        _at_least(values, name, least)
    return cluster.find(values.coordinator_address, values.num_processes, values.process_id, values.local_device_ids)


def _at_least(values: flags.FlagValues, name: str, least: int) -> None:
    if getattr(values, name) < least:
        raise UserError(f"--{name}: must be at least {least}, not {getattr(values, name)}")


def _for_devices(config: Config, options: Options, count: int) -> Config:
    """A smoke variant runs as it can on `count` devices, unless the command line has a mesh of its own."""
    if config_file.split(options.flags.config)[1] != "smoke" or any(
        key.startswith("mesh.") for key, _ in options.overrides
    ):
        return config
    from hybrid_jax import recipes

    found, mesh = recipes.smoke_on(config, count), config.mesh
    if found is not config:
        cuts = f"mesh.fsdp {mesh.fsdp} x mesh.tensor {mesh.tensor}"
        print(f"note: {cuts} do not divide {count} devices, so each holds the whole model", file=sys.stderr)
    return found


def start_devices(values: flags.FlagValues, group: cluster.Group | None, gemm_folder: str = "") -> None:
    """Sets the environment, imports jax, joins the other processes. Raises UserError."""
    name = platform.prepare(values.platform or "", several=group is not None, virtual_devices=values.virtual_devices)
    if not values.platform and not values.virtual_devices:
        warning = platform.unused_gpu(name, platform.installed_plugins(), platform.visible_hardware())
        if warning:
            print(f"warning: {warning}", file=sys.stderr)
    gemm_cache.prepare(gemm_folder, name)
    from hybrid_jax import distributed

    distributed.initialize(group, name, values.heartbeat_seconds, values.join_seconds)
    signals.AT_ONCE.install()  # jax.distributed has its own handler of SIGTERM
    platform.check_backend(name)
    distributed.check_expected(values.expected_devices)


def compile_only(config: Config) -> int:
    """--dry_run=compile: the dry-run table, then what compiling the step for these devices tells."""
    from hybrid_jax import data, report, train

    train.check_alike(config)
    config = report.on_these_devices(config)  # first: a mistake is to be one line and nothing else
    found = data.dry_run(config)
    print(f"{report.dry_run(config)}\n\n{found}\n", flush=True)
    print(report.compiled(config))
    return 0


def main(arguments: list[str], supervise: bool = False) -> int:
    """`run`, with a UserError as one line on stderr and its exit code. Of several processes, one that fails ends at
    once: what runs at exit would wait for the others."""
    try:
        return run(arguments, supervise)
    except UserError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr, flush=True)
        _leave(error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted before training", file=sys.stderr)
        return 130
    except Exception as error:
        if "jax" in sys.modules:
            from hybrid_jax import distributed

            distributed.await_abort(error)
            traceback.print_exc()
            _leave(1)
        raise


def _leave(code: int) -> None:
    if "jax" in sys.modules:
        from hybrid_jax import distributed

        distributed.leave(code)


def _program() -> int:
    """What `python launch.py` does; a trainer of several processes it does beside another such program."""
    supervised = supervisor.attach()
    if supervised:
        signals.StopRequest.together_seconds = 0.5
    return main(sys.argv[1:], supervise=not supervised)


if __name__ == "__main__":
    sys.exit(_program())
