"""Continues text with a trained model: python -m hybrid_jax.generate --checkpoint runs/tiny_hybrid --prompt "def "

The text goes to stdout as it is written, everything about it to stderr.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_jax import command, platform, progress, signals
from hybrid_jax.errors import UserError

if TYPE_CHECKING:
    from hybrid_jax.data.interface import Tokenizer
    from hybrid_jax.decoding.complete import Completion
    from hybrid_jax.decoding.decoder import Decoder, Rows
    from hybrid_jax.decoding.sampling import Sampling

SLOT = "{prompt}"  # in --template


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


# What is asked for.


def parser() -> command.Parser:
    made = command.Parser("generate", __doc__)
    add, several = made.add_argument, dict[str, Any](action="append", default=[])
    add("--checkpoint", metavar="RUN", help="a run's folder, or one checkpoint in it")
    add("--step", type=int, default=0, metavar="N", help="which of its checkpoints (default: the newest)")
    add("--prompt", **several, metavar="TEXT", help="what to continue; may be given several times")
    add(
        "--prompt_file",
        **several,
        metavar="FILE",
        help="a prompt but for its last line end; of .jsonl, one a line",
    )
    add("--interactive", action="store_true", help="a prompt after the other, each of which continues the text so far")
    add("--template", default=SLOT, metavar="TEXT", help=f"around each prompt, which stands for its {SLOT}")
    add("--max_new_tokens", type=int, default=256, metavar="N", help="most that are written (default: 256)")
    add("--temperature", type=float, default=0.8, metavar="X", help="0: the likeliest token always (default: 0.8)")
    add("--top_k", type=int, default=0, metavar="N", help="sample of the N likeliest only (default: 0: all)")
    add("--top_p", type=float, default=1.0, metavar="X", help="of the fewest with this probability (default: 1: all)")
    add("--repetition_penalty", type=float, default=1.0, metavar="X", help="above 1: against what stands there already")
    add("--seed", type=int, default=0, metavar="N", help="of what is sampled (default: 0)")
    add("--stop", **several, metavar="TEXT", help="ends the text, which does not hold it; may be given several times")
    add("--batch_size", type=int, default=16, metavar="N", help="prompts continued at a time (default: 16)")
    add("--json", action="store_true", help="a JSON object a prompt, on a line")
    add("--echo", action=argparse.BooleanOptionalAction, default=True, help="show prompts too (default)")
    add("--dtype", choices=("bfloat16", "float32"), default="", help="of activations and matmuls (default: as trained)")
    add("--platform", choices=platform.REQUESTS, default="", help="default: JAX_PLATFORMS, else auto")
    bench = made.add_argument_group("benchmark")
    bench.add_argument("--benchmark", action="store_true", help="time reading and writing of random ids")
    bench.add_argument("--config", default="", metavar="FILE.py", help="this model, its weights random")
    sizes = dict[str, Any](type=_sizes, default=[], metavar="N,N")
    bench.add_argument("--batch_sizes", **sizes, help="default: 1,64 (on a CPU 1,4)")
    bench.add_argument("--lengths", **sizes, help="tokens before what is written (default: 1024,65536; on a CPU 1024)")
    return made


def _sizes(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} are not whole numbers from 1 on, as in 1,64")
    return found


def check(options: argparse.Namespace) -> None:
    """Raises UserError for what does not go together, before anything is loaded."""
    if options.benchmark:
        if bool(options.config) == bool(options.checkpoint):
            raise UserError("--benchmark: needs a model, either --checkpoint or --config")
        return
    for name in ("config", "batch_sizes", "lengths"):
        if getattr(options, name):
            raise UserError(f"--{name}: is for --benchmark only")
    if not options.checkpoint:
        raise UserError("--checkpoint: missing; give a run's folder, as in --checkpoint runs/tiny_hybrid")
    given = bool(options.prompt or options.prompt_file)
    if options.interactive and (given or options.json):
        raise UserError(f"--interactive: prompts are typed; leave out --{'json' if options.json else 'prompt'}")
    if not options.interactive and not given:
        raise UserError("--prompt: missing; give --prompt, --prompt_file or --interactive")
    for name, least in (("max_new_tokens", 1), ("batch_size", 1), ("step", 0), ("seed", 0)):
        if getattr(options, name) < least:
            raise UserError(f"--{name}: {getattr(options, name)} is below {least}")
    if options.seed >= 2**32:
        raise UserError(f"--seed: {options.seed} is not below {2**32}")
    if SLOT not in options.template:
        raise UserError(f"--template: {options.template!r} has no {SLOT} in it")
    if not all(options.stop):
        raise UserError("--stop: is empty, and would end every text before its first character")


def prompts(options: argparse.Namespace) -> list[tuple[str, str]]:
    """(where from, text) of all of them, in order: --prompt, then --prompt_file. Raises UserError."""
    found = [("--prompt", text) for text in options.prompt]
    for name in options.prompt_file:
        where = f"--prompt_file: {name}"
        try:
            content = Path(name).expanduser().read_bytes().decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: is not UTF-8 (byte {error.start:,}); convert it, or give text") from None
        except OSError as error:
            raise UserError(f"{where}: {error.strerror or error}") from None
        if name.endswith(".jsonl"):
            lines = [(f"{where}, line {i + 1}", line) for i, line in enumerate(content.splitlines()) if line.strip()]
            found += [(at, _prompt_of(at, line)) for at, line in lines]
        else:
            found.append((where, content.removesuffix("\n")))
    for where, text in found:
        if not text:
            raise UserError(f"{where}: is empty; give at least a character to continue, if only a line end ($'\\n')")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"{where}: is not UTF-8") from None
    if not found:
        raise UserError(f"--prompt_file: {', '.join(options.prompt_file)}: holds no prompt")
    return found


def _prompt_of(where: str, line: str) -> str:
    try:
        return str(json.loads(line)["prompt"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f'{where}: is not a JSON object with a "prompt"') from None


# What is done.


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit code: 2 for a mistake of the user, 130 for Ctrl-C."""
    return command.main(run, arguments, "what has been written stays")


def run(arguments: Sequence[str]) -> int:
    """Everything between the command line and the exit code. Raises UserError."""
    options = parser().parse_args(arguments)
    check(options)
    texts = [] if options.interactive or options.benchmark else prompts(options)
    chosen = platform.prepare(options.platform)
    platform.check_backend(chosen)
    line = progress.Line("generate")
    if warning := platform.unused_gpu(chosen, platform.installed_plugins(), platform.visible_hardware()):
        line.say(f"warning: {warning}")
    remedy = "lower --batch_size or --max_new_tokens, shorten the prompt, or take --dtype=bfloat16"
    with command.logged(line.say):
        return command.within_memory(lambda: _run(options, texts, line), remedy)


def _run(options: argparse.Namespace, texts: list[tuple[str, str]], line: progress.Line) -> int:
    from hybrid_jax import trained
    from hybrid_jax.decoding import benchmark
    from hybrid_jax.decoding.decoder import Decoder
    from hybrid_jax.decoding.sampling import Sampling

    names = [field.name for field in dataclasses.fields(Sampling)]
    try:
        sampling = Sampling(**{name: getattr(options, name) for name in names})
    except UserError as error:
        raise UserError(f"--{error}") from None
    if options.config:
        return benchmark.run(benchmark.random(options.config, options.dtype), options, line.say)
    found = trained.open(options.checkpoint, options.step, line.say)
    model = found.model(options.dtype, backend="auto", attention="auto")  # this machine's, not the run's
    if options.benchmark:
        return benchmark.run(Decoder(model, found.params()), options, line.say)
    tokenizer = found.tokenizer()
    encoded = [_encode(tokenizer, options.template, where, text) for where, text in texts]
    longest = max(map(len, encoded), default=0) + options.max_new_tokens
    if longest > found.config.train.sequence_length and encoded:
        line.say(
            f"note: prompt and continuation may be {longest:,} tokens long, and the model was trained on "
            f"{found.config.train.sequence_length:,}"
        )
    decoder = Decoder(model, found.params(), tokenizer.end_of_document)
    line.say(f"{found.folder}: step {found.step:,}, {model.cfg.layout}, {model.compute_dtype}")
    if options.interactive:
        return _interactive(options, decoder, tokenizer, sampling, line)
    return _complete(options, decoder, tokenizer, sampling, texts, encoded, line)


def _encode(tokenizer: "Tokenizer", template: str, where: str, text: str) -> list[int]:
    try:
        ids = tokenizer.encode(template.replace(SLOT, text))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if not ids:
        raise UserError(f"{where}: {text!r} is no token of this tokenizer; give other text")
    return ids


def _complete(
    options: argparse.Namespace,
    decoder: "Decoder",
    tokenizer: "Tokenizer",
    sampling: "Sampling",
    texts: list[tuple[str, str]],
    encoded: list[list[int]],
    line: progress.Line,
) -> int:
    from hybrid_jax.decoding.complete import BLOCK, complete

    streams = len(texts) == 1 and not options.json
    echo = [texts[0][1]] if options.echo else []  # with the first piece: what is said before stays apart from it

    def show(number: int, piece: str) -> None:
        if streams and piece:
            write((echo.pop() if echo else "") + piece)

    def done(number: int, found: "Completion") -> None:
        prompt = texts[number][1]
        if options.json:
            record = {"number": number, "prompt": prompt, "text": found.text, "finish": found.finish}
            record |= {"prompt_tokens": len(encoded[number]), "tokens": len(found.ids)}
            write(json.dumps(record, ensure_ascii=False) + "\n")
        elif streams:
            write((echo.pop() if echo else "") + "\n")
        else:
            write(f"---- {number + 1} of {len(texts)} ----\n{prompt if options.echo else ''}{found.text}\n")

    def reading(read: int, total: int) -> None:
        if read == total:
            line.close()
        elif line.due():
            line.show(read / total, f"{read:,} of {total:,} tokens read")

    with signals.Interrupts().listen() as interrupts:
        interrupts.busy = True
        complete(
            decoder, tokenizer, encoded, max_new_tokens=options.max_new_tokens, sampling=sampling, seed=options.seed,
            stop=options.stop, batch_size=options.batch_size, block=1 if streams else BLOCK,
            show=show, done=done, progress=reading, interrupted=lambda: interrupts.asked,
        )  # fmt: skip
    rows = min(options.batch_size, len(texts))
    longest = max(map(len, encoded)) + options.max_new_tokens
    _say_timing(decoder, rows, longest, line)
    return 130 if interrupts.asked else 0


def _interactive(
    options: argparse.Namespace,
    decoder: "Decoder",
    tokenizer: "Tokenizer",
    sampling: "Sampling",
    line: progress.Line,
) -> int:
    from hybrid_jax.decoding.interactive import Conversation

    rows: Rows = decoder.rows([0], sampling, options.seed)
    with signals.Interrupts().listen() as interrupts:
        Conversation(
            rows, tokenizer, lambda text: _encode(tokenizer, options.template, "this line", text),
            max_new_tokens=options.max_new_tokens, stop=tuple(options.stop), interrupts=interrupts,
        ).run(write, line.say)  # fmt: skip
    _say_timing(decoder, 1, int(rows.length[0]), line)
    return 0


def _say_timing(decoder: "Decoder", rows: int, tokens: int, line: progress.Line) -> None:
    from hybrid_jax.decoding.decoder import capacity_for

    timing = decoder.timing
    for what, count, seconds in (
        ("read", timing.read_tokens, timing.read_seconds),
        ("wrote", timing.written_tokens, timing.write_seconds),
    ):
        line.say(f"{what:<5} {count:,} tokens in {seconds:.2f} s ({count / max(seconds, 1e-9):,.0f} a second)")
    constant, cache = decoder.state_bytes(rows, capacity_for(tokens))
    room = f", {cache:,} of attention's cache for {capacity_for(tokens):,} tokens" if cache else ", whatever the length"
    line.say(
        f"state {constant:,} bytes{room}, {rows} row{'s'[: rows > 1]}; "
        f"{len(decoder.programs)} programs compiled in {timing.compile_seconds:.1f} s"
    )


if __name__ == "__main__":
    signals.AT_ONCE.listen()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    sys.exit(main(sys.argv[1:]))
