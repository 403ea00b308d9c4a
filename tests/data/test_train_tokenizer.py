"""--train_tokenizer: the tokenizer, its sample, and that it can be ended anywhere."""

import io
import json
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from hybrid_jax.data import parts, prepare, train_tokenizer
from hybrid_jax.data.documents import Field
from hybrid_jax.data.inputs import find, sources
from hybrid_jax.data.store import StoreReader
from hybrid_jax.data.tokenizer import from_manifest
from hybrid_jax.errors import UserError
from tests.data.test_prepare import expected, lines, many, nothing_written, refused, run, start, write

SUFFIXES = (".bin", ".idx", ".json", ".tokenizer.json")


@pytest.fixture
def command(tmp_path):
    many(tmp_path / "in", 10)
    return ("--input", tmp_path / "in", "--output", tmp_path / "store", "--train_tokenizer", 600)


def test_it_is_the_bpe_of_the_documents(tmp_path, command, capsys):
    """Against `tokenizers` itself, given whole documents in order."""
    assert run(*command) == 0
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=599, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    documents = expected(tmp_path / "in")
    bpe.train_from_iterator(documents, trainer)
    about = json.loads((tmp_path / "store.json").read_text())
    about["tokenizer"].pop("sha256"), about["tokenizer"].pop("bytes_per_token")
    assert about["tokenizer"] == {
        "name": "trained-600",
        "vocab_size": 600,
        "end_of_document": 599,
        "trained_on": sum(len(text.encode()) for text in documents),
    }
    made = json.loads((tmp_path / "store.tokenizer.json").read_text())
    assert made["model"] == json.loads(bpe.to_str())["model"]
    reader, t = StoreReader(tmp_path / "store"), from_manifest(tmp_path / "store")
    for number, text in enumerate(documents):
        assert reader.document(number).tolist() == [*bpe.encode(text).ids, 599]
    assert 599 not in t.encode("<|endoftext|>") and t.decode(t.encode("<|endoftext|>")) == "<|endoftext|>"
    assert capsys.readouterr().err.startswith("prepare: training a tokenizer of 600 ids on up to 32 MiB of the input\n")


def test_workers_change_no_byte(tmp_path, command, monkeypatch):
    monkeypatch.setattr(prepare, "PART_BYTES", 2**14)
    monkeypatch.setattr(train_tokenizer, "SAMPLE_BYTES", 2**15)
    monkeypatch.setattr(train_tokenizer, "_SHARE", 2**12)
    assert run(*command) == 0
    assert run(*command[:2], "--output", tmp_path / "two", *command[4:], workers=2) == 0
    for suffix in SUFFIXES:
        assert (tmp_path / f"store{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()
    about = json.loads((tmp_path / "store.json").read_text())
    assert 2**15 <= about["tokenizer"]["trained_on"] < 2**15 + 2**13 < about["text_bytes"]


def test_a_sample_is_of_the_whole_input_and_bounded(tmp_path, monkeypatch):
    write(tmp_path, {f"{i:02d}.txt": f"{i:02d} {'word ' * 400}\n" * 10 for i in range(40)})
    files = sources(find([str(tmp_path)]))

    def sample(limit, share):
        monkeypatch.setattr(train_tokenizer, "SAMPLE_BYTES", limit)
        monkeypatch.setattr(train_tokenizer, "_SHARE", share)
        monkeypatch.setattr(train_tokenizer.tokenizer, "PIECE_CHARACTERS", 2004)
        return list(train_tokenizer.sample(files, None, 2**14, Field("text")))

    whole = sum(file.size for file in files)
    assert len(sample(whole, 1)) == 400  # all of it
    one_each = [text[:2] for text in sample(whole // 10, 1)]
    assert len(one_each) == 40 and len(set(one_each)) == 40
    some = [text[:2] for text in sample(whole // 10, 9000)]
    assert len(some) == 40 and len(set(some)) == 8 and some != sorted(some)
    assert [text[:2] for text in sample(whole // 10, 9000)] == some


def test_encoded_data_is_left_out(tmp_path):
    noise = np.random.default_rng(0).integers(97, 123, 4_000_000).astype(np.uint8).tobytes().decode()
    write(tmp_path / "in", {"a.txt": noise, "b.txt": "real words of a text\n" * 99})
    began = time.monotonic()
    assert run("--input", tmp_path / "in", "--output", tmp_path / "store", "--train_tokenizer", 2000) == 0
    assert time.monotonic() - began < 20  # minutes with the noise
    t = from_manifest(tmp_path / "store")
    assert len(t.encode("real words of a text")) == 5 and t.vocab_size < 300


@pytest.fixture
def unfinished(command, monkeypatch, capsys):
    """The command, ended by Ctrl-C when two parts were whole."""
    monkeypatch.setattr(prepare, "PART_BYTES", 2**14)
    made = parts.make_part

    def make_part(job, number, *rest):
        if number == 2:
            raise KeyboardInterrupt
        return made(job, number, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(parts, "make_part", make_part)
        assert run(*command) == 130
    assert "2 whole parts are kept" in capsys.readouterr().err
    return command


def never(*_):
    raise AssertionError("trained again")


def test_given_again_it_is_not_trained_again(tmp_path, unfinished, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(train_tokenizer, "train", never)
        assert run(*unfinished) == 0 and "prepare: 2 of " in capsys.readouterr().err
        before = {suffix: (tmp_path / f"store{suffix}").read_bytes() for suffix in SUFFIXES}
        assert run(*unfinished) == 0 and "is whole already" in capsys.readouterr().out
    assert run(*unfinished, "--overwrite") == 0
    assert before == {suffix: (tmp_path / f"store{suffix}").read_bytes() for suffix in SUFFIXES}


def test_a_damaged_tokenizer_is_trained_again(tmp_path, unfinished, capsys):
    file = tmp_path / "store.parts" / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:-2])
    assert run(*unfinished) == 0
    error = capsys.readouterr().err
    assert "prepare: training a tokenizer" in error and "prepare: 2 of " in error
    (tmp_path / "store.tokenizer.json").unlink()
    message = refused(capsys, *unfinished)
    assert message == f"--output: {tmp_path / 'store.bin'} is there already; name another, or --overwrite replaces it"


def test_other_options_are_refused_before_it_trains(tmp_path, unfinished, capsys, monkeypatch):
    monkeypatch.setattr(train_tokenizer, "train", never)
    for options, what in (
        (("--train_tokenizer", 601), "--tokenizer was trained-600, is trained-601"),
        (("--text_field", "body"), "--text_field was text, is body"),
    ):
        assert f"holds parts of another run: {what}; undo that, or --overwrite" in refused(
            capsys, *unfinished, *options
        )
    write(tmp_path / "in", {"00/0.txt": "other text"})
    assert f"the input file {tmp_path / 'in' / '00' / '0.txt'} has changed" in refused(capsys, *unfinished)


def test_ctrl_c_ends_it_at_once(tmp_path):
    text = Path(io.__file__).read_text()
    write(tmp_path / "in", {"a.txt": "".join(chr(0x4E00 + ord(c) % 97 * 7 + i % 59) for i, c in enumerate(text * 9))})
    process = start("--input", tmp_path / "in", "--output", tmp_path / "store", "--train_tokenizer", 60_000)
    assert process.stderr.readline().startswith("prepare: training a tokenizer of 60,000 ids")
    time.sleep(0.5)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()
    assert time.monotonic() - began < 10
    assert process.returncode == 130 and error == "\nstopped: no part was whole yet, nothing is kept\n", error
    assert nothing_written(tmp_path)


def test_records_are_text_too(tmp_path):
    write(tmp_path, {"a.jsonl": lines(*({"prompt": "ask ask ask", "response": "answer answer"} for _ in range(9)))})
    command = ("--input", tmp_path / "a.jsonl", "--output", tmp_path / "store", "--train_tokenizer", 280, "--records")
    assert run(*command) == 0
    t = from_manifest(tmp_path / "store")
    assert len(t.encode(" answer")) == len(t.encode(" ask")) == 1


def test_bad_options_and_input_are_one_line(tmp_path, command, capsys):
    both = "--train_tokenizer: makes a tokenizer; leave --tokenizer and --eod_token out"
    for options, what in (
        (("--train_tokenizer", 256), "--train_tokenizer: 256: at least 257 (256 bytes and the end of a document)"),
        (("--train_tokenizer", "8k"), "--train_tokenizer: invalid int value: '8k'"),
        (("--tokenizer", "bytes"), both),
        (("--eod_token", "</s>"), both),
    ):
        assert refused(capsys, *command, *options) == what
    assert nothing_written(tmp_path)
    write(tmp_path / "in", {"bad.jsonl": "{"})
    assert run(*command) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("prepare: training a tokenizer of 600 ids")
    assert second.startswith(f"error: {tmp_path / 'in' / 'bad.jsonl'}: line 1: is not JSON: Expecting property name")
    assert nothing_written(tmp_path)


def test_an_error_in_the_sample_is_the_users(monkeypatch):
    def texts():
        yield "some words"
        raise UserError("a.txt: gone")

    with pytest.raises(UserError, match=r"^a\.txt: gone$"):
        train_tokenizer.train(300, texts())


def test_little_text_gives_fewer_ids(capsys):
    found = train_tokenizer.train(5000, iter(["ab ab", "cd cd"]))
    assert (found.size, found.end_of_document, found.origin) == (261, 260, {"trained_on": 10})
    assert capsys.readouterr().err.endswith("prepare: that text gives only 261 ids, not 5,000\n")
