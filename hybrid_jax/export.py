"""A trained model for other libraries: python -m hybrid_jax.export --checkpoint runs/gdn_300m --out gdn_300m-hf

Writes the newest checkpoint of a run as safetensors files with config.json, tokenizer and model card, in a format
that transformers or flash-linear-attention load. One tensor is in memory at a time. The folder is there whole or not
at all.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hybrid_jax import command, platform
from hybrid_jax.errors import UserError
from hybrid_jax.metrics import short


def run(arguments: Sequence[str]) -> int:
    """Everything between the command line and the exit code. Raises UserError."""
    parser = command.Parser("export", __doc__)
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="RUN", help="a run's folder, its checkpoints/ or one checkpoint")
    add("--out", required=True, metavar="DIR", help="the folder to write")
    add("--step", type=int, default=0, metavar="N", help="of the checkpoint (default: the newest whole one)")
    add("--format", default="auto", help="auto (default): the first that holds the model; or a model_type")
    add("--dtype", default="float32", help="float32 (default), bfloat16 or float16, rounded to nearest even")
    add("--max_shard_size", default="5GB", metavar="SIZE", help="of a file of weights (default: 5GB)")
    add("--tokenizer", default="", metavar="FILE", help="a tokenizer.json in place of the run's, or none")
    add("--overwrite", action="store_true", help="replace an older export")
    options = parser.parse_args(arguments)
    platform.prepare("cpu")
    from hybrid_jax import trained
    from hybrid_jax.interop import exporter, shards

    try:
        max_shard_bytes = shards.size_of(options.max_shard_size)
    except ValueError:
        raise UserError(f"--max_shard_size: {options.max_shard_size!r} is not a size such as 5GB or 500MiB") from None
    dtype = exporter.dtype_name(options.dtype)
    out = Path(os.path.abspath(os.path.expanduser(options.out)))
    done = exporter.export(
        trained.open(options.checkpoint, options.step),
        out,
        format_name=options.format,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        tokenizer_name=options.tokenizer,
        overwrite=options.overwrite,
    )
    files = f"{len(done.files)} files" if len(done.files) > 1 else done.files[0]
    print(
        f"{options.out}: {done.format} of {done.format.library}, {done.parameters:,} parameters in {dtype}, "
        f"{short(done.bytes)}B in {files}"
    )
    if not done.has_tokenizer:
        print(f"no tokenizer beside it{'' if options.tokenizer else ': the run was trained on ids without text'}")
    return 0


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit code: 2 for a mistake of the user, 130 for Ctrl-C."""
    return command.main(run, arguments, "nothing was written")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
