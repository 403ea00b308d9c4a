"""A store of training and one of validation; and whether a store is as it was written."""

import collections
import json
import signal
from pathlib import Path

import numpy as np
import pytest

from hybrid_jax.config import DataConfig
from hybrid_jax.data import open as open_data
from hybrid_jax.data import prepare
from hybrid_jax.data.store import StoreReader, StoreWriter
from tests.data.test_prepare import (
    bpe_file,  # noqa: F401
    expected,
    large,  # noqa: F401
    lines,
    many,
    nothing_written,
    refused,
    run,
    start,
    texts,
    until_parts,
    write,
)
from tests.data.test_store import one_line
from tests.data.test_store_source import open_store

SUFFIXES = (".bin", ".idx", ".json", ".validation.bin", ".validation.idx", ".validation.json")


def numbered(count, first=0):
    return [{"text": f"{number} " + "x" * (number % 40)} for number in range(first, first + count)]


def contents(prefix):
    return {suffix: Path(f"{prefix}{suffix}").read_bytes() for suffix in SUFFIXES}


def test_each_document_is_in_one_of_them_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "PART_BYTES", 2**15)
    folder = many(tmp_path / "in")
    for workers in (1, 2):
        arguments = ("--input", folder, "--output", tmp_path / f"s{workers}", "--validation_fraction", 0.3)
        assert run(*arguments, workers=workers) == 0
    assert contents(tmp_path / "s1") == contents(tmp_path / "s2")
    train, validation = texts(tmp_path / "s1"), texts(tmp_path / "s1.validation")
    want = expected(folder)
    assert collections.Counter(train + validation) == collections.Counter(want)
    held_out = {*validation}  # in the order of the input
    assert validation == [text for text in want if text in held_out]
    assert train == [text for text in want if text not in held_out]
    assert 0.1 * len(want) < len(validation) < 0.5 * len(want)
    for split, name in (("train", "s1"), ("validation", "s1.validation")):
        about = json.loads((tmp_path / f"{name}.json").read_text())
        reader = StoreReader(tmp_path / name)
        assert (about["split"], about["documents"], about["tokens"]) == (split, reader.num_documents, reader.num_tokens)
        assert about["text_bytes"] == reader.num_tokens - reader.num_documents
        assert about["options"]["validation_fraction"] == 0.3
    assert run(*arguments) == 0 and "is whole already" in capsys.readouterr().out
    assert not (tmp_path / "s2.parts").exists()


def test_copies_of_a_text_are_on_one_side(tmp_path):
    rows = numbered(300)
    shuffled = np.random.default_rng(0).permutation(900)
    write(tmp_path, {"a.jsonl": lines(*(rows[i % 300] for i in shuffled))})
    assert run("--input", tmp_path, "--output", tmp_path / "s", "--validation_fraction", 0.1) == 0
    train, validation = texts(tmp_path / "s"), texts(tmp_path / "s.validation")
    assert not {*train} & {*validation} and len(train) + len(validation) == 900
    assert {*collections.Counter(train + validation).values()} == {3}
    assert 9 < len({*validation}) < 60


def test_what_is_held_out_depends_on_the_text_alone(tmp_path, bpe_file):  # noqa: F811
    """Not on the tokenizer, on more text, nor on where documents are cut into parts."""
    rows = numbered(400)
    write(tmp_path / "in", {"b.jsonl": lines(*rows)})
    common = ("--validation_fraction", 0.2, "--input", tmp_path / "in")
    assert run(*common, "--output", tmp_path / "first") == 0
    held_out = texts(tmp_path / "first.validation")
    assert run(*common, "--output", tmp_path / "bpe", "--tokenizer", bpe_file) == 0
    assert StoreReader(tmp_path / "bpe.validation").num_documents == len(held_out)
    write(tmp_path / "in", {"a.jsonl": lines(*numbered(200, 1000))})
    write(tmp_path / "in", {"long.txt": "a long document " * 100_000})
    assert run(*common, "--output", tmp_path / "more") == 0
    assert [text for text in texts(tmp_path / "more.validation") if text in {row["text"] for row in rows}] == held_out


@pytest.mark.parametrize("fraction", [1e-9, 0.999999])
def test_of_two_texts_one_is_on_each_side(tmp_path, fraction):
    write(tmp_path, {"a.jsonl": lines(*numbered(2), *numbered(2))})
    assert run("--input", tmp_path, "--output", tmp_path / "s", "--validation_fraction", fraction) == 0
    assert {*texts(tmp_path / "s"), *texts(tmp_path / "s.validation")} == {row["text"] for row in numbered(2)}
    assert len(texts(tmp_path / "s")) == len(texts(tmp_path / "s.validation")) == 2


def test_what_is_refused(tmp_path, capsys):
    write(tmp_path, {"a.jsonl": lines(*3 * numbered(1))})
    base = ("--input", tmp_path / "a.jsonl", "--output", tmp_path / "store", "--validation_fraction")
    for value in (-0.1, 1, 1.5, "nan"):
        assert refused(capsys, *base, value) == f"--validation_fraction: {float(value)} is not in [0, 1)"
    message = refused(capsys, *base, 0.5)
    assert message == "--validation_fraction: there is only one text, so none can be held out; leave it out"
    assert nothing_written(tmp_path)


def test_max_tokens_is_of_both(tmp_path):
    write(tmp_path, {"a.jsonl": lines(*numbered(400))})
    common = ("--input", tmp_path, "--max_tokens", 2000)
    assert run(*common, "--output", tmp_path / "all") == 0
    assert run(*common, "--output", tmp_path / "s", "--validation_fraction", 0.3) == 0
    both = texts(tmp_path / "s") + texts(tmp_path / "s.validation")
    assert sorted(both) == sorted(texts(tmp_path / "all")) and len(texts(tmp_path / "s.validation")) > 3


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_in_the_middle_loses_and_doubles_nothing(tmp_path, bpe_file, large, workers):  # noqa: F811
    common = ("--input", large[0], "--tokenizer", bpe_file, "--validation_fraction", 0.25, "--workers", workers)
    whole = start(*common, "--output", tmp_path / "whole")
    assert whole.communicate()[0] and whole.returncode == 0
    for count in (2, 6):
        process = start(*common, "--output", tmp_path / "store")
        until_parts(process, tmp_path / "store.parts", count)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    again = start(*common, "--output", tmp_path / "store")
    assert again.communicate()[0] and again.returncode == 0
    assert contents(tmp_path / "store") == contents(tmp_path / "whole")
    readers = [StoreReader(tmp_path / f"store{side}") for side in ("", ".validation")]
    assert sum(reader.num_documents for reader in readers) == StoreReader(large[1]).num_documents
    assert sum(reader.num_tokens for reader in readers) == StoreReader(large[1]).num_tokens


def test_a_validation_store_goes_with_its_store(tmp_path, capsys):
    write(tmp_path, {"a.jsonl": lines(*numbered(100)), "b.txt": "mine"})
    base = ("--input", tmp_path / "a.jsonl", "--output", tmp_path / "s")
    there = [tmp_path / f"s.validation{suffix}" for suffix in (".bin", ".idx", ".json")]
    assert run(*base, "--validation_fraction", 0.3) == 0
    assert f"{tmp_path}/s.bin is there already" in refused(capsys, *base, "--validation_fraction", 0.2)
    assert run(*base, "--overwrite") == 0  # of which nothing is held out
    assert len(texts(tmp_path / "s")) == 100 and not any(path.exists() for path in there)
    assert run("--input", tmp_path / "b.txt", "--output", tmp_path / "s.validation") == 0  # made by itself
    assert run(*base, "--overwrite") == 0 and texts(tmp_path / "s.validation") == ["mine"]
    for path in tmp_path.glob("s.[bij]*"):
        path.unlink()
    assert f"{there[0]} is there already" in refused(capsys, *base, "--validation_fraction", 0.3)
    assert run(*base, "--validation_fraction", 0.3, "--overwrite") == 0
    assert len(texts(tmp_path / "s")) + len(texts(tmp_path / "s.validation")) == 100


def test_both_are_trained_and_validated_on(tmp_path):
    write(tmp_path, {"a.jsonl": lines(*numbered(300))})
    assert run("--input", tmp_path, "--output", tmp_path / "s", "--validation_fraction", 0.2) == 0
    config = DataConfig(source="store", path=str(tmp_path / "s"), validation_path=str(tmp_path / "s.validation"))
    for split, name in (("train", "s"), ("validation", "s.validation")):
        dataset = open_data(config, sequence_length=32, vocab_size=257, seed=1, split=split)
        assert dataset.num_tokens == StoreReader(tmp_path / name).num_tokens
        assert dataset.tokenizer.decode([72, 105]) == "Hi"


# Whether a store is as it was written.


@pytest.fixture
def store(tmp_path):
    rows = [{"prompt": f"{i} is", "response": "x" * (i % 30 + 1)} for i in range(200)]
    write(tmp_path, {"a.jsonl": lines(*rows)})
    arguments = ("--input", tmp_path / "a.jsonl", "--output", tmp_path / "s")
    assert run(*arguments, "--records", "--validation_fraction", 0.3) == 0
    return tmp_path / "s"


def verify(capsys, prefix):
    """(exit code, the only line that it prints)."""
    capsys.readouterr()
    code = prepare.main(["--verify", str(prefix)])
    said = capsys.readouterr()
    if code:
        assert not said.out and said.err.count("\n") == 1 and said.err.startswith("error: ")
        return code, said.err[len("error: ") : -1]
    return code, said.out


@pytest.mark.parametrize("named", ["s", "s.bin", "s.idx"])
def test_a_whole_store_is_verified_with_its_validation_store(store, capsys, named):
    before = sorted(store.parent.iterdir())
    code, out = verify(capsys, store.with_name(named))
    counts = [StoreReader(store.with_name(name)) for name in ("s", "s.validation")]
    assert code == 0 and out == "".join(
        f"{store}{side}: as it was written: {reader.num_documents:,} documents, {reader.num_tokens:,} tokens\n"
        for side, reader in zip(("", ".validation"), counts, strict=True)
    )
    assert sorted(store.parent.iterdir()) == before


@pytest.mark.parametrize("ending", [".bin", ".idx", ".mask.bin"])
@pytest.mark.parametrize("side", ["", ".validation"])
def test_a_file_that_is_not_as_it_was_written(store, capsys, ending, side):
    path = Path(f"{store}{side}{ending}")
    whole = path.read_bytes()
    middle = len(whole) // 2
    size = f"has {len(whole) - 1} bytes, s{side}.json says {len(whole)}; copy the files of one store"
    for content, words in (
        (whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :], "was changed: its checksum is another one"),
        (whole[:-1], size),
        (None, "no such file; it is a part of the store and has to be copied with it"),
    ):
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        code, error = verify(capsys, store)
        assert code == 2 and error.startswith(f"{path}: {words}")
        path.write_bytes(whole)
    assert verify(capsys, store)[0] == 0


def test_what_cannot_be_verified(store, capsys, tmp_path):
    about = json.loads(Path(f"{store}.json").read_text())
    with StoreWriter(tmp_path / "plain", vocab_size=9) as writer:
        writer.append(np.asarray([1, 2]))
    assert "not the manifest of a store that prepare made" in verify(capsys, tmp_path / "plain")[1]
    assert "not the manifest of a store that prepare made" in verify(capsys, tmp_path / "none")[1]
    files = about.pop("files")
    for change, words in (
        ({}, "is of an older version, without checksums; there is nothing to compare with"),
        ({"files": files, "documents": 3}, "counts 3 documents, s.idx has "),
        ({"files": files, "version": 9}, "is a manifest of version 9, not 2"),
    ):
        Path(f"{store}.json").write_text(json.dumps({**about, **change}))
        code, error = verify(capsys, store)
        assert code == 2 and words in error
    assert prepare.main(["--verify", str(store), "--output", "x"]) == 2
    assert "--verify: makes no store; leave" in capsys.readouterr().err


def test_the_loader_compares_sizes(store):
    """A file of another store that would pass for this one's."""
    path = Path(f"{store}.json")
    about = json.loads(path.read_text())
    size = about["files"][".idx"]["bytes"]
    about["files"][".idx"]["bytes"] += 8
    path.write_text(json.dumps({**about, "files": [3]}))
    assert "s.json: its list of files is damaged; prepare the store again" in one_line(open_store, store)
    path.write_text(json.dumps(about))
    assert one_line(open_store, store) == (
        f"config.data.path: {store}.idx: has {size} bytes, s.json says {size + 8}; copy the files of one store"
    )
