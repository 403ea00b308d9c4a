"""Another library's model as a run: python -m hybrid_jax.import_hf --model llama-3.2-1b --out runs/llama

Reads a folder of safetensors files with config.json, of transformers or flash-linear-attention, and writes a run with
config.json, tokenizer and a checkpoint of the parameters. `launch.py --config=RUN/config.json` trains from there.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hybrid_jax import command, platform


def run(arguments: Sequence[str]) -> int:
    """Everything between the command line and the exit code. Raises UserError."""
    parser = command.Parser("import_hf", __doc__)
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="a folder with config.json and .safetensors files")
    add("--out", required=True, metavar="RUN", help="the run's folder to write")
    add("--overwrite", action="store_true", help="replace an older one")
    options = parser.parse_args(arguments)
    platform.prepare("cpu")
    from hybrid_jax.data.tokenizer import BpeTokenizer
    from hybrid_jax.interop import importer

    out, model = (Path(os.path.abspath(os.path.expanduser(path))) for path in (options.out, options.model))
    importer.check_free(out, options.overwrite)  # before the weights are read
    found = importer.read(model)
    config = importer.write(found, model, out, options.overwrite)
    dtypes = ", ".join(f"{count} tensors {name}" for name, count in sorted(found.dtypes.items()))
    print(f"{options.out}: {found.format} of {found.format.library}, {found.parameters:,} parameters ({dtypes})")
    if not isinstance(found.tokenizer, BpeTokenizer):
        print(f"no tokenizer: {options.model} holds no tokenizer.json, so the run knows ids without text")
    print(
        f"train it:  python launch.py --config={options.out}/config.json --config.data.path=PREFIX "
        f"--config.train.sequence_length={config.train.sequence_length}"
    )
    return 0


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit code: 2 for a mistake of the user, 130 for Ctrl-C."""
    return command.main(run, arguments, "nothing was written")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
