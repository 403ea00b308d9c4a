"""Text files to a token store: what is in it, and that it can be interrupted anywhere."""

import gzip
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from hybrid_jax import data
from hybrid_jax.config import DataConfig
from hybrid_jax.data import documents, inputs, locks, prepare
from hybrid_jax.data import parts as parts_lib
from hybrid_jax.data.store import StoreReader

ROOT = Path(__file__).resolve().parents[2]
END = 256


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def run(*arguments, workers=1):
    return prepare.main([*map(str, arguments), "--workers", str(workers)])


def refused(capsys, *arguments, **settings):
    """The one line of an error. Nothing of the store may be there afterwards."""
    assert run(*arguments, **settings) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    return error[len("error: ") : -1]


def texts(prefix):
    """The documents of a store of bytes, each checked to end in the end-of-document id and to hold no other."""
    reader = StoreReader(prefix)
    found = []
    for number in range(reader.num_documents):
        ids = reader.document(number).tolist()
        assert ids[-1] == END and END not in ids[:-1]
        found.append(bytes(ids[:-1]).decode())
    return found


def nothing_written(folder):
    return not [p.name for p in folder.iterdir() if p.name.startswith(("store", ".store"))]


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture(scope="module")
def bpe_file(tmp_path_factory):
    """A byte-level BPE whose file also asks for truncation and padding, as published ones may."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<pad>", "<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([Path(json.__file__).read_text(), Path(io.__file__).read_text()], trainer)
    bpe.enable_truncation(16)
    bpe.enable_padding(length=8, pad_token="<pad>")
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    bpe.save(str(path))
    return path


def many(folder, count=40, seed=0):
    """Files of all plain kinds with, together, more than half a MiB."""
    rng = np.random.default_rng(seed)
    words = Path(io.__file__).read_text().split(" ")

    def text():
        return " ".join(rng.choice(words, rng.integers(1, 800)).tolist()) + " é\n"

    files = {f"{i:02d}/{i}.{('txt', 'md', 'py')[i % 3]}": text() for i in range(count)}
    files["05/z.jsonl"] = lines(*({"text": text(), "id": i} for i in range(count)))
    files["07/z.jsonl.gz"] = gzip.compress(lines(*({"text": text()} for _ in range(5))).encode(), mtime=0)
    return write(folder, files)


def expected(folder):
    """The same documents by the plainest reading."""
    found = []
    for path in sorted(folder.rglob("*"), key=str):
        if path.is_file():
            raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            is_lines = ".jsonl" in path.name
            found += [json.loads(line)["text"] for line in raw.splitlines()] if is_lines else [raw.decode()]
    return found


# What is in a store.


def test_bytes_round_trip(tmp_path, capsys):
    folder = many(tmp_path / "in")
    assert run("--input", folder, "--output", tmp_path / "store") == 0
    assert texts(tmp_path / "store") == expected(folder)
    assert "85 documents" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "store.bin", "store.idx", "store.json"]


@pytest.mark.parametrize("append", [True, False])
def test_bpe_round_trip_is_the_encoding_of_whole_documents(tmp_path, bpe_file, append):
    folder = many(tmp_path / "in")
    source = Path(argparse_file()).read_text()
    long = source * (2 * documents.PIECE_CHARACTERS // len(source) + 1)  # is encoded in pieces
    write(folder, {"long.py": long, "99.txt": "it ends <|endoftext|> <pad>"})
    flag = "--append_eod" if append else "--no-append_eod"
    assert run("--input", folder, "--output", tmp_path / "store", "--tokenizer", bpe_file.parent, flag) == 0
    bpe = tokenizers.Tokenizer.from_file(str(bpe_file))
    end = [bpe.token_to_id("<|endoftext|>")] * append
    bpe.no_truncation()
    bpe.no_padding()
    bpe.encode_special_tokens = True
    reader = StoreReader(tmp_path / "store")
    want = expected(folder)
    assert reader.num_documents == len(want)
    for number, text in enumerate(want):
        assert reader.document(number).tolist() == bpe.encode(text).ids + end
    special = {bpe.token_to_id("<|endoftext|>"), bpe.token_to_id("<pad>")}
    assert int(np.isin(reader.tokens, list(special)).sum()) == append * len(want)


def argparse_file():
    import argparse

    return argparse.__file__


def test_workers_change_no_byte(tmp_path, bpe_file, monkeypatch):
    folder = many(tmp_path / "in")
    monkeypatch.setattr(prepare, "PART_BYTES", 2**15)
    common = ("--input", folder, "--tokenizer", bpe_file)
    assert len(inputs.cut(inputs.sources(inputs.find([str(folder)])), 2**15)) >= 8
    for workers in (1, 2):
        assert run(*common, "--output", tmp_path / f"store{workers}", workers=workers) == 0
        assert run(*common, "--output", tmp_path / f"cut{workers}", "--max_tokens", 50_000, workers=workers) == 0
    for name in ("store", "cut"):
        for suffix in (".bin", ".idx", ".json"):
            assert (tmp_path / f"{name}1{suffix}").read_bytes() == (tmp_path / f"{name}2{suffix}").read_bytes()
    assert 45_000 < StoreReader(tmp_path / "cut1").num_tokens <= 50_000 < StoreReader(tmp_path / "store1").num_tokens


def joined(document):
    return "".join(text for text, _ in document.pieces)


def test_parts_cut_files_of_lines_anywhere(tmp_path, monkeypatch):
    """Each line belongs to one part, wherever the cuts fall: on a line's first byte, its end, or inside it."""
    written = [f"{i} " + "x" * (i % 7) for i in range(60)]
    raw = b"\xef\xbb\xbf" + b"\r\n".join(json.dumps({"text": t}).encode() for t in written)
    write(tmp_path, {"a.jsonl": raw + b"\n\n"})
    files = inputs.sources([str(tmp_path / "a.jsonl")])
    for part_bytes in (*range(1, 40), 10**6):
        spans = [span for part in inputs.cut(files, part_bytes) for span in part]
        reader = documents.Reader(documents.Field("text"))
        assert [joined(d) for span in spans for d in reader.documents(span)] == written
        assert reader.bytes_read == files[0].size and reader.replaced == 0


def test_max_tokens_cuts_at_a_document(tmp_path, capsys):
    write(tmp_path, {"a.jsonl": lines(*({"text": "x" * 9} for _ in range(10)))})
    for limit, kept in ((10, 1), (39, 3), (40, 4), (41, 4), (100, 10), (1000, 10)):
        assert run("--input", tmp_path, "--output", tmp_path / f"store{limit}", "--max_tokens", limit) == 0
        assert texts(tmp_path / f"store{limit}") == ["x" * 9] * kept
        manifest = json.loads((tmp_path / f"store{limit}.json").read_text())
        assert (manifest["documents"], manifest["tokens"], manifest["text_bytes"]) == (kept, 10 * kept, 9 * kept)
    message = refused(capsys, "--input", tmp_path, "--output", tmp_path / "store", "--max_tokens", 9)
    assert message == "--max_tokens: 9 is less than the first document, of 10 tokens"
    assert not (tmp_path / "store.bin").exists()


def test_manifest(tmp_path, bpe_file):
    write(tmp_path / "in", {"a.txt": "alpha é", "b.jsonl": lines({"body": "beta"}), "c.txt": "", "d.txt": b"\xff!"})
    arguments = ("--input", tmp_path / "in", "--output", tmp_path / "store", "--text_field", "body")
    assert run(*arguments, "--tokenizer", bpe_file) == 0
    manifest = json.loads((tmp_path / "store.json").read_text())
    reader = StoreReader(tmp_path / "store")
    sources, files = manifest.pop("sources"), manifest.pop("files")
    assert {source["kind"] for source in sources} == {"input file"}
    assert [(Path(s["path"]).name, s["size"]) for s in sources] == [
        ("a.txt", 8),
        ("b.jsonl", 17),
        ("c.txt", 0),
        ("d.txt", 2),
    ]
    assert len({s["digest"] for s in sources}) == 4
    assert len(manifest["tokenizer"].pop("sha256")) == 64
    assert manifest["tokenizer"].pop("bytes_per_token") == 16 / reader.num_tokens
    assert (tmp_path / "store.tokenizer.json").read_bytes() == bpe_file.read_bytes()
    assert manifest == {
        "format": "hybrid_jax token store",
        "version": 2,
        "documents": 3,
        "tokens": reader.num_tokens,
        "text_bytes": 8 + 4 + 4,
        "empty": 1,
        "replaced": 1,
        "loss_mask": False,
        "split": "all",
        "dtype": "uint16",
        "tokenizer": {"name": str(bpe_file), "vocab_size": 500, "end_of_document": 1},
        "options": {
            "records": False,
            "text_field": "body",
            "append_eod": True,
            "max_tokens": None,
            "validation_fraction": 0.0,
        },
    }
    assert files == {
        suffix: {"bytes": len(raw), "crc32": zlib.crc32(raw)}
        for suffix in (".bin", ".idx")
        for raw in [(tmp_path / f"store{suffix}").read_bytes()]
    }


def test_training_reads_the_same_documents(tmp_path):
    folder = many(tmp_path / "in", 10)
    assert run("--input", folder, "--output", tmp_path / "store") == 0
    config = DataConfig(source="store", path=str(tmp_path / "store"), validation_fraction=0.0)
    dataset = data.open(config, sequence_length=64, vocab_size=257, seed=1)
    want = expected(folder)
    assert dataset.num_tokens == sum(len(text.encode()) + 1 for text in want)
    rows = dataset.num_windows // 2
    count = 0
    for batch in (dataset.batch(step, range(rows), rows) for step in (0, 1)):
        for tokens, segments in zip(batch["tokens"], batch["segment_ids"], strict=True):
            for segment in range(1, segments.max() + 1):
                ids = tokens[segments == segment]
                assert END not in ids[:-1]  # a segment is of one document
                piece = bytes(ids[ids < END].tolist())
                assert any(piece in text.encode() for text in want)
                count += len(ids)
    assert count == 2 * rows * 64


def test_large_vocabulary(tmp_path):
    vocab = {"a": 0, "b": 70_000, "</s>": 70_001}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, {"a.txt": "b a b", "b.txt": " ", "c.txt": "c"})
    assert run("--input", tmp_path / "*.txt", "--output", tmp_path / "store", "--tokenizer", tmp_path) == 0
    reader = StoreReader(tmp_path / "store")
    assert [reader.document(i).tolist() for i in range(reader.num_documents)] == [
        [70_000, 0, 70_000, 70_001],
        [0, 70_001],
    ]
    manifest = json.loads((tmp_path / "store.json").read_text())
    assert (manifest["dtype"], manifest["tokenizer"]["vocab_size"], manifest["empty"]) == ("int32", 70_002, 1)


def test_order_is_that_of_the_inputs(tmp_path):
    write(tmp_path / "in", {"b/2.txt": "two", "b/1.txt": "one", "a.txt": "three", "c.md": "four", "skip.bin": "no"})
    write(tmp_path / "in", {".git/x.txt": "no", "b/__pycache__/x.py": "no", "b/.x.txt": "no"})
    inputs = (tmp_path / "in" / "b", tmp_path / "in" / "*.txt", tmp_path / "in")
    assert run("--input", *inputs, "--output", tmp_path / "store") == 0
    assert texts(tmp_path / "store") == ["one", "two", "three", "four"]


# Ended and given again.

SMALL_PARTS = (
    "import sys; from hybrid_jax.data import prepare; prepare.PART_BYTES = 2**15; sys.exit(prepare.main(sys.argv[1:]))"
)


def start(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SMALL_PARTS, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes)


def until_parts(process, folder, count=1):
    while sum(p.stem.isdigit() for p in folder.glob("*.json")) < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)


@pytest.fixture(scope="module")
def large(tmp_path_factory, bpe_file):
    """(input, the store that an unbroken run makes of it)."""
    folder = tmp_path_factory.mktemp("large")
    many(folder / "in", 150)
    process = start("--input", folder / "in", "--tokenizer", bpe_file, "--output", folder / "whole", "--workers", 1)
    assert process.communicate()[0] and process.returncode == 0
    return folder / "in", folder / "whole"


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_in_the_middle_goes_on_where_it_was(tmp_path, bpe_file, large, workers):
    common = ("--input", large[0], "--tokenizer", bpe_file)
    common = (*common, "--workers", workers)
    process = start(*common, "--output", tmp_path / "store")
    until_parts(process, tmp_path / "store.parts", 3)
    process.send_signal(signal.SIGKILL)
    process.communicate()  # also waits for the workers, which hold the pipes: they end with it
    assert not (tmp_path / "store.bin").exists() and not (tmp_path / "store.idx").exists()
    parts = tmp_path / "store.parts"
    kept = sorted(p for p in parts.glob("*.json") if p.stem.isdigit())

    # A part that is whole is not made again: one that was altered, with its digest, reaches the store.
    shutil.copytree(parts, tmp_path / "altered.parts")
    first = np.fromfile(tmp_path / "altered.parts" / "000000.bin", "<u2")
    first[0] = 499 if first[0] != 499 else 498
    first.tofile(tmp_path / "altered.parts" / "000000.bin")
    record = tmp_path / "altered.parts" / "000000.json"
    counts = {name: count for name, count in json.loads(record.read_bytes()).items() if name != "digest"}
    files = [record.with_suffix(suffix) for suffix in (".bin", ".sizes")]
    digest = parts_lib._digest(counts, [parts_lib._digest_of(file) for file in files])
    record.write_text(json.dumps({**counts, "digest": digest}))
    # One that is not as it was written is.
    with (parts / kept[-1].name).with_suffix(".bin").open("r+b") as file:
        file.write(b"\xff")
    for name in ("store", "altered"):
        again = start(*common, "--output", tmp_path / name)
        _, error = again.communicate()
        assert again.returncode == 0, error
        assert f"prepare: {len(kept) - (name == 'store')} of " in error
        assert not (tmp_path / f"{name}.parts").exists()
    for suffix in (".bin", ".idx", ".json"):
        assert (tmp_path / f"store{suffix}").read_bytes() == Path(f"{large[1]}{suffix}").read_bytes()
    ids, altered = (np.fromfile(f"{prefix}.bin", "<u2") for prefix in (large[1], tmp_path / "altered"))
    assert np.flatnonzero(ids != altered).tolist() == [0]


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_says_what_is_kept(tmp_path, bpe_file, large, workers):
    common = ("--input", large[0], "--tokenizer", bpe_file, "--output", tmp_path / "store", "--workers", workers)
    process = start(*common)
    until_parts(process, tmp_path / "store.parts")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
    out, error = process.communicate()
    assert process.returncode == 130 and not out
    assert "Traceback" not in error and "the same command goes on from there" in error
    assert f" kept in {tmp_path / 'store.parts'}" in error
    assert not list(tmp_path.glob("store.bin")) and not list((tmp_path / "store.parts").glob(".*.tmp"))


def test_worker_that_is_ended_is_one_line(tmp_path, bpe_file, large):
    common = ("--input", large[0], "--tokenizer", bpe_file, "--output", tmp_path / "store", "--workers", 2)
    process = start(*common)
    until_parts(process, tmp_path / "store.parts")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        process.kill()
        process.communicate()
        pytest.skip("this system does not list a process's children")
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children.read_text().split()}
    worker = next(pid for pid, command in commands.items() if b"spawn_main" in command)
    blocked = Path(f"/proc/{worker}/status").read_text().split("SigBlk:")[1].split()[0]
    assert int(blocked, 16) >> (signal.SIGINT - 1) & 1  # Ctrl-C is for the first process alone
    os.kill(worker, signal.SIGKILL)
    _, error = process.communicate()
    assert process.returncode == 2 and "Traceback" not in error
    assert error.splitlines()[-1].startswith("error: a worker process was ended from outside, perhaps for want of ")
    assert (tmp_path / "store.parts" / "plan.json").exists()


@pytest.fixture
def unfinished(tmp_path, monkeypatch):
    """A command that ended after two of three parts, for want of a field in the third."""
    monkeypatch.setattr(prepare, "PART_BYTES", 2**13)
    write(tmp_path / "in", {f"{i}.txt": "x" * 9000 for i in range(2)})
    write(tmp_path / "in", {"2.jsonl": lines({"other": "y"})})
    arguments = ("--input", tmp_path / "in", "--output", tmp_path / "store")
    assert run(*arguments) == 2
    assert (tmp_path / "store.parts" / "000001.json").exists()
    return arguments


@pytest.mark.parametrize("suffix", [".bin", ".sizes", ".json"])
def test_a_part_of_which_a_byte_changed_is_made_again(tmp_path, unfinished, capsys, suffix):
    path = tmp_path / "store.parts" / f"000001{suffix}"
    content = path.read_bytes()
    # A digit of a count, or the lowest byte of an id or a size.
    at = content.index(b'"text_bytes": ') + len('"text_bytes": ') if suffix == ".json" else 0
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    capsys.readouterr()
    assert run(*unfinished) == 2
    assert "prepare: 1 of 3 parts are whole already" in capsys.readouterr().err
    assert path.read_bytes() == content


def test_other_options_are_refused(tmp_path, unfinished, bpe_file, capsys):
    capsys.readouterr()
    for more, what in (
        (("--text_field", "other"), "--text_field was text, is other"),
        (("--max_tokens", 5), "--max_tokens was None, is 5"),
        (("--no-append_eod",), "--append_eod was True, is False"),
        (("--tokenizer", bpe_file), f"--tokenizer was bytes, is {bpe_file} with other content"),
    ):
        assert refused(capsys, *unfinished, *more) == (
            f"--output: {tmp_path / 'store.parts'} holds parts of another run: {what}; "
            "undo that, or --overwrite starts anew"
        )
    assert (tmp_path / "store.parts" / "000001.json").exists()
    assert run(*unfinished, "--text_field", "other", "--overwrite") == 0
    assert texts(tmp_path / "store")[2] == "y" and not (tmp_path / "store.parts").exists()


def test_other_inputs_are_refused(tmp_path, unfinished, capsys):
    capsys.readouterr()
    folder = tmp_path / "in"
    original = (folder / "2.jsonl").read_bytes()
    write(folder, {"2.jsonl": original.replace(b"y", b"z")})
    assert f"the input file {folder / '2.jsonl'} has changed" in refused(capsys, *unfinished)
    write(folder, {"2.jsonl": original, "3.txt": "more"})
    assert f"the input file {folder / '3.txt'} is new" in refused(capsys, *unfinished)
    (folder / "3.txt").unlink()
    (folder / "0.txt").rename(tmp_path / "0.txt")
    assert f"the input file {folder / '0.txt'} is gone" in refused(capsys, *unfinished)
    (tmp_path / "0.txt").rename(folder / "0.txt")
    assert "line 1: has no field 'text'" in refused_after_parts(capsys, *unfinished)


@pytest.mark.parametrize("name", ["tokenizer", "sha256", "options", "sources", "size"])
def test_a_damaged_plan_is_refused(tmp_path, unfinished, capsys, name):
    capsys.readouterr()
    plan = tmp_path / "store.parts" / "plan.json"
    plan.write_text(plan.read_text().replace(f'"{name}"', f'"x{name[1:]}"'))
    message = refused(capsys, *unfinished)
    assert message.startswith(f"--output: {tmp_path / 'store.parts'} holds parts of another run: it is damaged, or ano")
    assert message.endswith("--overwrite starts anew")


def refused_after_parts(capsys, *arguments):
    assert run(*arguments) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == "prepare: 2 of 3 parts are whole already"
    return second


def test_a_store_that_is_there(tmp_path, capsys):
    write(tmp_path, {"a.txt": "alpha", "b.txt": "beta"})
    arguments = ("--input", tmp_path / "a.txt", "--output", tmp_path / "store")
    assert run(*arguments) == 0
    before = (tmp_path / "store.bin").stat().st_mtime_ns
    assert run(*arguments) == 0
    assert "is whole already" in capsys.readouterr().out
    other = ("--input", tmp_path / "b.txt", "--output", tmp_path / "store")
    assert refused(capsys, *other) == (
        f"--output: {tmp_path / 'store.bin'} is there already; name another, or --overwrite replaces it"
    )
    assert (tmp_path / "store.bin").stat().st_mtime_ns == before and texts(tmp_path / "store") == ["alpha"]
    mask = tmp_path / "store.mask.bin"  # of the older store
    mask.write_bytes(b"\1")
    assert run(*other, "--overwrite") == 0 and texts(tmp_path / "store") == ["beta"]
    assert not mask.exists()
    assert run("--input", tmp_path / "none.txt", "--output", tmp_path / "store", "--overwrite") == 2
    assert texts(tmp_path / "store") == ["beta"]


def test_two_at_once_are_refused(tmp_path, capsys):
    write(tmp_path, {"a.txt": "alpha"})
    with locks.only_command(tmp_path / "store.parts"):
        message = refused(capsys, "--input", tmp_path, "--output", tmp_path / "store")
    assert message == f"--output: another process is preparing {tmp_path / 'store.parts'}; wait for it"


def test_what_is_not_ours_is_left_alone(tmp_path):
    write(tmp_path, {"a.txt": "alpha", "store.parts/notes": "mine"})
    assert run("--input", tmp_path / "a.txt", "--output", tmp_path / "store", "--overwrite") == 0
    assert [p.name for p in (tmp_path / "store.parts").iterdir()] == ["notes"]


def test_options_that_are_refused(tmp_path, capsys, bpe_file):
    write(tmp_path, {"a.txt": "alpha", "b.json": "{}"})
    without = json.loads(bpe_file.read_text())
    without["added_tokens"] = []
    write(tmp_path, {"none.json": json.dumps(without).replace("<|endoftext|>", "<other>")})
    base = ("--input", tmp_path / "a.txt", "--output", tmp_path / "store")
    for more, what in (
        (("--max_tokens", 0), "--max_tokens: 0 is not positive"),
        (("--max_tokens", "x"), "--max_tokens: invalid int value: 'x'"),
        (("--tokenizer", tmp_path / "t"), f"--tokenizer: {tmp_path / 't'}: No such file or directory; give a tok"),
        (("--tokenizer", tmp_path), f"--tokenizer: {tmp_path / 'tokenizer.json'}: No such file or directory"),
        (("--tokenizer", tmp_path / "b.json"), f"--tokenizer: {tmp_path / 'b.json'}: is not a tokenizer.json: "),
        (("--tokenizer", tmp_path / "none.json"), f"--eod_token: {tmp_path / 'none.json'} has none of <|endoftext|>, "),
        (("--tokenizer", bpe_file, "--eod_token", "<x>"), f"--eod_token: '<x>' is not in the vocabulary of {bpe_file}"),
        (("--eod_token", "<x>"), "--eod_token: 'bytes' ends documents with the id 256; leave it out"),
        (("--output", tmp_path / "no" / "store"), f"--output: there is no folder {tmp_path / 'no'}; make it first"),
        (("--output", tmp_path), f"--output: '{tmp_path}' is a folder; name the store in it, as "),
        (("--output", f"{tmp_path}/"), f"--output: '{tmp_path}/' is a folder; name the store in it, as "),
        (("--unknown", 1), "unrecognized arguments: --unknown 1"),
    ):
        assert refused(capsys, *base, *more).startswith(what)
    assert refused(capsys, *base, workers=0) == "--workers: 0 is not positive"
    assert nothing_written(tmp_path)
    assert run(*base, "--tokenizer", tmp_path / "none.json", "--no-append_eod") == 0
    assert run(*base, "--tokenizer", bpe_file, "--eod_token", "<pad>", "--overwrite") == 0
    assert StoreReader(tmp_path / "store").tokens[-1] == 0
