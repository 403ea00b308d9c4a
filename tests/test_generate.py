"""The command: a trained run continued, at a terminal too, and one line for every mistake."""

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from hybrid_jax import generate, train, trained
from hybrid_jax.decoding import benchmark
from hybrid_jax.decoding.complete import complete
from hybrid_jax.decoding.decoder import Decoder
from hybrid_jax.decoding.sampling import Sampling
from tests.tiny import tiny_config

ROOT = Path(__file__).parent.parent
GREEDY = ["--temperature=0", "--max_new_tokens=24"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps on bytes, with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("generate")
    (folder / "texts").mkdir()
    for i in range(4):
        (folder / "texts" / f"{i}.txt").write_text(f"text number {i}: one two three\n" * 40)
    data = {"data__source": "files", "data__path": str(folder / "texts"), "data__validation_fraction": 0.3}
    saves = {"checkpoint__every_steps": 1, "model__pattern": "S-", "model__vocab_size": 260}
    train.run(tiny_config(folder / "run", train__steps=2, **data, **saves))
    return folder / "run"


@pytest.fixture(scope="module")
def decoder(run):
    found = trained.open(run)
    return Decoder(found.model(), found.params(), found.tokenizer().end_of_document)


def answer(decoder, tokenizer, ids, stop=()) -> str:
    """What 24 greedy tokens after these ids spell."""
    (found,) = complete(decoder, tokenizer, [ids], max_new_tokens=24, sampling=Sampling(0.0), stop=stop)
    return found.text


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Of processes that compile the same: once, and in haste."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled"))}
    always = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return {**os.environ, **cache, **always}


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()  # other tests compare bits


def test_end_to_end(run, decoder, environment):
    """A process of its own: text on stdout, what it took on stderr."""
    found = subprocess.run(
        [sys.executable, "-m", "hybrid_jax.generate", "--checkpoint", str(run), "--prompt=one two", *GREEDY],
        cwd=ROOT, env=environment, capture_output=True, timeout=300,
    )  # fmt: skip
    tokenizer = trained.open(run).tokenizer()
    assert found.returncode == 0, found.stderr
    assert found.stdout.decode() == "one two" + answer(decoder, tokenizer, tokenizer.encode("one two")) + "\n"
    err = found.stderr.decode()
    assert re.search(r"run/checkpoints/2: step 2, S-, float32", err)
    assert re.search(r"read  7 tokens in [\d.]+ s \([\d,]+ a second\)", err)
    assert re.search(r"wrote 24 tokens in [\d.]+ s \([\d,]+ a second\)", err)
    state = sum(x.nbytes for x in jax.tree.leaves(decoder.model.init_state(1, 0)))
    assert f"state {state:,} bytes, whatever the length, 1 row; 3 programs compiled" in err


def test_several_prompts_as_json(run, decoder, tmp_path, capsys):
    """Prompts of the command line and of files, two at a time, in a template: each what it would be alone."""
    (tmp_path / "one.txt").write_text("a file é\n\n")
    (tmp_path / "more.jsonl").write_text('{"prompt": "first"}\n\n{"prompt": "second", "id": 3}\n')
    files = ["--prompt_file", str(tmp_path / "one.txt"), "--prompt_file", str(tmp_path / "more.jsonl")]
    arguments = [
        "--checkpoint",
        str(run),
        "--prompt=typed",
        *files,
        "--json",
        "--batch_size=2",
        "--template=<{prompt}>",
    ]
    assert generate.main([*arguments, *GREEDY]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["typed", "a file é\n", "first", "second"]
    tokenizer = trained.open(run).tokenizer()
    for number, line in enumerate(lines):
        ids = tokenizer.encode(f"<{line['prompt']}>")
        assert line["text"] == answer(decoder, tokenizer, ids)
        assert (line["number"], line["prompt_tokens"], line["tokens"]) == (number, len(ids), 24)
        assert line["finish"] == "length"


def test_text_and_stop_strings(run, decoder, capsys):
    """Several texts under headings, without their prompts where that is asked, each up to its stop string."""
    tokenizer = trained.open(run).tokenizer()
    whole = answer(decoder, tokenizer, tokenizer.encode("ab"))
    stop = whole[5:8]
    cut = whole[: whole.find(stop)]
    arguments = ["--checkpoint", str(run), "--prompt=ab", "--prompt=ab", "--no-echo", "--stop", stop, *GREEDY]
    assert generate.main(arguments) == 0
    assert capsys.readouterr().out == f"---- 1 of 2 ----\n{cut}\n---- 2 of 2 ----\n{cut}\n"


def test_a_conversation_goes_on(run, decoder, monkeypatch, capsys):
    """Each line continues all before it, which is not read again; /reset forgets it."""
    tokenizer = trained.open(run).tokenizer()
    lines = ["ab", "", "cd", "/help", " /reset", "ab", "/quit", "never"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    assert generate.main(["--checkpoint", str(run), "--interactive", *GREEDY]) == 0
    out, err = capsys.readouterr()
    first = answer(decoder, tokenizer, tokenizer.encode("ab"))
    # The ids and not their text, in which bytes that are none of it are lost.
    (found,) = complete(decoder, tokenizer, [tokenizer.encode("ab")], max_new_tokens=24, sampling=Sampling(0.0))
    second = answer(decoder, tokenizer, [*tokenizer.encode("ab"), *found.ids, *tokenizer.encode("cd")])
    assert out == f"{first}\n{second}\n{first}\n"
    assert "forget the text so far" in err
    assert "read  7 tokens" in err  # ab, the first answer's last token and cd, ab


def test_a_terminal(run, environment):
    """Ctrl-C stops an answer, then the text goes on; at the prompt it leaves nothing; Ctrl-D leaves."""
    master, slave = pty.openpty()
    # Of recurrent states there is room for an answer of any length.
    arguments = ["--checkpoint", str(run), "--interactive", "--max_new_tokens=100000000", "--temperature=0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "hybrid_jax.generate", *arguments], cwd=ROOT, stdin=slave, stdout=slave, stderr=slave,
        env={**environment, "TERM": "dumb"},
    )  # fmt: skip
    os.close(slave)
    shown = b""

    def more(seconds: float = 120) -> bool:
        nonlocal shown
        ready = bool(select.select([master], [], [], seconds)[0])
        shown += os.read(master, 4096) if ready else b""
        return ready

    def until(words: bytes) -> None:
        nonlocal shown
        while words not in shown:
            assert more(), shown
        shown = shown[shown.index(words) + len(words) :]

    try:
        until(b"/help    this")
        until(b"> ")
        os.write(master, b"abc\n")
        until(b"abc\r\n")
        while len(shown) < 50:
            assert more(), shown
        process.send_signal(signal.SIGINT)
        until(b"\r\n> ")
        process.send_signal(signal.SIGINT)
        while b"/quit" not in shown:
            if not more(5):  # of one between the prompt and its wait for input Python hears with the next
                process.send_signal(signal.SIGINT)
        until(b"/quit or Ctrl-D leaves")
        until(b"> ")
        os.write(master, b"/quitting\n")
        until(b"/quitting\r\n")
        # How much stands before it is a matter of time, and with it whether the model ends this answer itself.
        while len(shown) < 50 and b"\r\n> " not in shown:
            assert more(), shown
        if b"\r\n> " not in shown:
            process.send_signal(signal.SIGINT)
        until(b"\r\n> ")
        os.write(master, b"\x04")
        until(b"generate: wrote")
        until(b"programs compiled")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_a_closed_pipe_ends_quietly(run, environment):
    line = f"{sys.executable} -m hybrid_jax.generate --checkpoint {run} --prompt a --max_new_tokens=100000000"
    found = subprocess.run(
        ["bash", "-c", f"{line} --temperature=0 | head -c 100; echo ${{PIPESTATUS[0]}}"],
        cwd=ROOT, env=environment, capture_output=True, timeout=300,
    )  # fmt: skip
    assert found.stdout.endswith(b"0\n") and len(found.stdout) == 102
    assert b"Traceback" not in found.stderr and b"BrokenPipe" not in found.stderr, found.stderr


GIVEN = ["--checkpoint=RUN", "--prompt=a"]
MISTAKES = [
    ([], "--checkpoint: missing; give a run's folder"),
    (["--checkpoint=RUN"], "--prompt: missing; give --prompt, --prompt_file or --interactive"),
    (["--checkpoint=nowhere", "--prompt=a"], "nowhere: no such folder"),
    (["--checkpoint=RUN/checkpoints/3.orbax-checkpoint-tmp-1", "--prompt=a"], "was not written to its end"),
    ([*GIVEN, "--step=7"], "has no checkpoint 7; there are 1, 2"),
    ([*GIVEN, "--step=-1"], "--step: -1 is below 0"),
    (["--checkpoint=RUN", "--prompt="], "--prompt: is empty"),
    ([*GIVEN, "--prompt_file=HERE/empty.txt"], "empty.txt: is empty; give at least"),
    ([*GIVEN, "--prompt_file=HERE/latin1.txt"], "latin1.txt: is not UTF-8 (byte 1)"),
    ([*GIVEN, "--prompt_file=HERE/none.txt"], "none.txt: No such file"),
    ([*GIVEN, "--prompt_file=HERE/bad.jsonl"], 'bad.jsonl, line 2: is not a JSON object with a "prompt"'),
    (["--checkpoint=RUN", "--prompt_file=HERE/blank.jsonl"], "blank.jsonl: holds no prompt"),
    (["--checkpoint=RUN", "--prompt=\udcff"], "--prompt: is not UTF-8"),
    ([*GIVEN, "--temperature=-1"], "--temperature: -1.0 is not a number from 0 on"),
    ([*GIVEN, "--top_p=0"], "--top_p: 0.0 is not above 0 and at most 1"),
    ([*GIVEN, "--top_p=1.1"], "--top_p: 1.1"),
    ([*GIVEN, "--top_k=-3"], "--top_k: -3 is negative"),
    ([*GIVEN, "--top_k=x"], "--top_k: invalid int value: 'x'"),
    ([*GIVEN, "--repetition_penalty=0"], "--repetition_penalty: 0.0"),
    ([*GIVEN, "--max_new_tokens=0"], "--max_new_tokens: 0 is below 1"),
    ([*GIVEN, "--batch_size=0"], "--batch_size: 0 is below 1"),
    ([*GIVEN, "--seed=4294967296"], "--seed: 4294967296 is not below"),
    ([*GIVEN, "--stop="], "--stop: is empty"),
    ([*GIVEN, "--template=User:"], "--template: 'User:' has no {prompt}"),
    ([*GIVEN, "--interactive"], "--interactive: prompts are typed; leave out --prompt"),
    (["--checkpoint=RUN", "--interactive", "--json"], "leave out --json"),
    ([*GIVEN, "--config=configs/gdn_300m.py"], "--config: is for --benchmark only"),
    (["--benchmark"], "--benchmark: needs a model, either --checkpoint or --config"),
    (["--benchmark", "--config=x.py", "--lengths=0"], "--lengths: '0' are not whole numbers from 1 on"),
    ([*GIVEN, "--dtype=float16"], "--dtype: invalid choice: 'float16'"),
    ([*GIVEN, "--platform=rocm"], "--platform: rocm asked for, but the installed jax is without a plugin"),
    ([*GIVEN, "--promt=x"], "unrecognized arguments: --promt=x"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=[words[:40] for _, words in MISTAKES])
def test_mistakes_are_one_line(arguments, words, run, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "latin1.txt").write_bytes("aé".encode("latin-1"))
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    (tmp_path / "blank.jsonl").write_text("\n")
    (run / "checkpoints" / "3.orbax-checkpoint-tmp-1").mkdir(exist_ok=True)
    given = [a.replace("RUN", str(run)).replace("HERE", str(tmp_path)) for a in arguments]
    assert generate.main(given) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and err.count("\n") == 1 and words in err, err


def test_another_tokenizer(run, tmp_path, capsys):
    """Ids that the model does not have are named before anything is compiled."""
    shutil.copytree(run, tmp_path / "run")
    record = tmp_path / "run" / "tokenizer" / "hybrid_jax.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"kind": "ids", "vocab_size": 1000}))
    given = ["--checkpoint", str(tmp_path / "run"), *GREEDY]
    assert generate.main([*given, "--prompt=5 999"]) == 2
    assert "holds the id 999, and the model's vocabulary has 260" in capsys.readouterr().err
    assert generate.main([*given, "--prompt=words"]) == 2
    assert "--prompt: 'words': this tokenizer's source has no text; give ids below 1000" in capsys.readouterr().err


def test_benchmark(run, decoder, monkeypatch, capsys):
    """Rates and times agree, and the floor is weights once and recurrent states twice at the speed of a copy."""
    monkeypatch.setattr(benchmark.timing, "measure_peaks", lambda: benchmark.timing.Peaks(1e8, 1e12))
    arguments = ["--benchmark", "--checkpoint", str(run), "--batch_sizes=2", "--lengths=20"]
    assert generate.main(arguments) == 0
    header, head, _, line, note = capsys.readouterr().out.splitlines()
    assert header.startswith("cpu (cpu), jax ") and header.endswith("float32, S-") and "at the 0 GB/s" in note
    values = dict(zip(re.split(r" {2,}", head), line.split(), strict=True))
    assert (values["rows"], values["length"], values["cache"]) == ("2", "20", "0.0")
    rate, step, floor = (float(values[k].replace(",", "")) for k in ("write tok/s", "ms a step", "floor ms"))
    assert np.isclose(rate, 2 / step * 1e3, rtol=0.02)
    moved = sum(x.nbytes for x in jax.tree.leaves(decoder.params)) + 2 * decoder.state_bytes(2, 0)[0]
    assert np.isclose(floor, moved / 1e8 * 1e3, rtol=0.01)
    assert np.isclose(float(values["x floor"]), step / floor, rtol=0.02, atol=0.06)  # printed with a digit
