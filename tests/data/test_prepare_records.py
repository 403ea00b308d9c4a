"""Prompts and responses to a store with a loss mask; see also test_records."""

import gzip
import json
import os
import signal

import numpy as np
import pytest
import tokenizers

from hybrid_jax.data import documents, parts, prepare, records
from hybrid_jax.data.store import StoreReader, StoreWriter
from tests.data.test_prepare import bpe_file, lines, nothing_written, refused, run, start, until_parts, write  # noqa: F401
from tests.data.test_store import one_line
from tests.data.test_store_source import open_store

END = 256


def asked(count=300, seed=0):
    """Records of both forms, some of many pieces."""
    rng = np.random.default_rng(seed)
    words = "alpha beta gamma é 😀 delta <|endoftext|> \n".split(" ")

    def text(longest):
        return " ".join(rng.choice(words, rng.integers(0, longest)).tolist())

    found = []
    for number in range(count):
        longest = 4000 if number % 60 == 7 else 30
        if number % 3:
            form = {"prompt": text(longest), ("response", "completion")[number % 2]: f"{number} {text(longest)}"}
        else:
            roles = ["system", "user", "assistant", "user", "assistant", "user"][: rng.integers(3, 7)]
            form = {"messages": [{"role": role, "content": f"{role[:1]}{text(longest)}"} for role in roles]}
        found.append({**form, "id": number})
    return found


@pytest.fixture
def small(monkeypatch):
    """So that there are many parts, calls and pieces."""
    monkeypatch.setattr(prepare, "PART_BYTES", 2**13)
    monkeypatch.setattr(parts, "CALL_CHARACTERS", 2**10)
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 2**11)


def plainly(prefix, found, encode, end, vocab_size):
    """The same store by StoreWriter and records.encode."""
    with StoreWriter(prefix, vocab_size=vocab_size, masked=True) as writer:
        for record in found:
            writer.append(*records.encode(record, encode, end))
    return prefix


def same(ours, theirs, suffixes=(".bin", ".idx", ".mask.bin")):
    for suffix in suffixes:
        assert (ours.parent / f"{ours.name}{suffix}").read_bytes() == (
            theirs.parent / f"{theirs.name}{suffix}"
        ).read_bytes(), suffix


def test_the_store_is_that_of_encode(tmp_path, bpe_file, small):  # noqa: F811
    found = asked()
    raw = lines(*found).encode()
    write(tmp_path / "in", {"a.jsonl": raw[: len(raw) // 2 + 200].rpartition(b"\n")[0] + b"\n"})
    head = (tmp_path / "in" / "a.jsonl").read_bytes()
    write(tmp_path / "in", {"b.jsonl.gz": gzip.compress(raw[len(head) :])})
    bpe = tokenizers.Tokenizer.from_file(str(bpe_file))
    bpe.no_truncation()
    bpe.no_padding()
    bpe.encode_special_tokens = True
    end = bpe.token_to_id("<|endoftext|>")
    by_bpe = plainly(tmp_path / "bpe", found, lambda text: bpe.encode(text).ids, end, 500)
    by_bytes = plainly(tmp_path / "bytes", found, lambda text: list(text.encode()), END, 257)
    common = ("--input", tmp_path / "in", "--records")
    for workers in (1, 2):
        assert run(*common, "--output", tmp_path / f"b{workers}", "--tokenizer", bpe_file, workers=workers) == 0
        same(tmp_path / f"b{workers}", by_bpe)
    assert (tmp_path / "b1.json").read_bytes() == (tmp_path / "b2.json").read_bytes()
    assert run(*common, "--output", tmp_path / "c") == 0
    same(tmp_path / "c", by_bytes)
    about = json.loads((tmp_path / "c.json").read_text())
    reader = StoreReader(tmp_path / "c")
    assert about["loss_mask"] is True and about["options"]["records"] is True
    assert about["options"]["text_field"] is None
    assert about["learnt_tokens"] == int(reader.learn.sum()) and about["documents"] == len(found)
    assert about["files"][".mask.bin"]["bytes"] == reader.num_tokens


def test_tables_hold_records_too(tmp_path, small):
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    found = asked(90)
    names = ("prompt", "response", "completion", "messages")
    table = pyarrow.table({"id": range(90), **{name: [r.get(name) for r in found] for name in names}})
    (tmp_path / "in").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "in" / "a.parquet", row_group_size=7)
    assert run("--input", tmp_path / "in", "--records", "--output", tmp_path / "s", workers=2) == 0
    same(tmp_path / "s", plainly(tmp_path / "t", found, lambda text: list(text.encode()), END, 257))
    bare = pyarrow.table({"text": ["a"]})
    pyarrow.parquet.write_table(bare, tmp_path / "in" / "a.parquet")


def test_parquet_of_other_columns_is_refused(tmp_path, capsys):
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    for table, what in (
        ({"text": ["a"]}, 'has no text "prompt"; give "prompt" and "response", or "messages"'),
        ({"prompt": ["a", "b"], "response": ["c", None]}, 'row 2: has no text "response"; give "prompt" and'),
    ):
        pyarrow.parquet.write_table(pyarrow.table(table), path)
        message = refused(capsys, "--input", path, "--records", "--output", tmp_path / "store")
        assert message.startswith(f"{path}: {what}")
    assert nothing_written(tmp_path)


@pytest.mark.parametrize(
    ("record", "what"),
    [
        ({"text": "a"}, 'has no text "prompt"; give "prompt" and "response", or "messages"'),
        ({"prompt": "a", "response": None}, 'has no text "response"; give "prompt" and "response", or "messages"'),
        ({"prompt": "a", "response": ""}, "its response is empty, so there is nothing to learn"),
        ({"messages": []}, 'its "messages" are no list of objects with "role" and "content"'),
        ({"messages": [{"role": "user"}]}, 'its message 1 is no object with the texts "role" and "content"'),
        (
            {"messages": [{"role": "user", "content": "a"}]},
            'none of its messages has the role "assistant", so there is nothing to learn',
        ),
        (["prompt"], 'is no JSON object with "prompt" and "response", or with "messages"'),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_row_of_neither_form_is_one_line(tmp_path, capsys, small, monkeypatch, record, what, packed):
    monkeypatch.setattr(prepare, "PART_BYTES", 2**9)  # so that its part does not begin with the file
    raw = (lines(*4 * asked(5)) + "\n" + json.dumps(record) + "\n" + lines(*asked(5))).encode()
    name = "a.jsonl.gz" if packed else "a.jsonl"
    write(tmp_path / "in", {name: gzip.compress(raw) if packed else raw})
    message = refused(capsys, "--input", tmp_path / "in", "--records", "--output", tmp_path / "store")
    assert message.startswith(f"{tmp_path / 'in' / name}: line 22: {what}; mend or remove ")
    assert not (tmp_path / "store.bin").exists()


def test_a_response_without_a_token_is_found_where_it_stands(tmp_path, capsys, small):
    """An encoder may make nothing of a text: known only once it has been encoded, with many others."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    rows = [{"prompt": "a b", "response": "a"} for _ in range(9)]
    rows.insert(5, {"prompt": "a", "response": "  "})
    rows.insert(2, {"prompt": " ", "response": "c"})
    write(tmp_path, {"a.jsonl": lines(*rows)})
    arguments = ("--input", tmp_path / "a.jsonl", "--records", "--tokenizer", tmp_path, "--output", tmp_path / "store")
    assert refused(capsys, *arguments) == (
        f"{tmp_path / 'a.jsonl'}: line 7: its response is empty, so there is nothing to learn; mend or remove it"
    )
    assert nothing_written(tmp_path)


def test_killed_in_the_middle_goes_on_where_it_was(tmp_path):
    write(tmp_path, {f"in/{i}.jsonl": lines(*asked(500, seed=i)) for i in range(8)})
    common = ("--input", tmp_path / "in", "--records", "--validation_fraction", 0.2, "--workers", 2)
    whole = start(*common, "--output", tmp_path / "whole")
    process = start(*common, "--output", tmp_path / "store")
    until_parts(process, tmp_path / "store.parts", 3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = sorted((tmp_path / "store.parts").glob("0*.mask"))
    kept[1].write_bytes(bytes([kept[1].read_bytes()[0] ^ 1]) + kept[1].read_bytes()[1:])  # is made again
    again = start(*common, "--output", tmp_path / "store")
    assert again.communicate()[0] and again.returncode == 0
    assert whole.communicate()[0] and whole.returncode == 0
    suffixes = (".bin", ".idx", ".mask.bin", ".json")
    same(tmp_path / "store", tmp_path / "whole", [*suffixes, *(f".validation{suffix}" for suffix in suffixes)])
    assert not (tmp_path / "store.parts").exists()


def test_the_mask_is_there_before_the_index(tmp_path, monkeypatch):
    """A store is there when its index is: whoever opens it then finds all of it."""
    write(tmp_path, {"a.jsonl": lines(*asked(20))})
    replace, order = os.replace, []

    def watched(source, target):
        replace(source, target)
        order.append(os.path.basename(target))

    monkeypatch.setattr(os, "replace", watched)
    assert run("--input", tmp_path, "--records", "--validation_fraction", 0.3, "--output", tmp_path / "s") == 0
    placed = [name for name in order if name.startswith("s.")]
    assert placed[-4:] == ["s.mask.bin", "s.bin", "s.json", "s.idx"]
    assert placed[-8:-4] == [name.replace("s.", "s.validation.") for name in placed[-4:]]


@pytest.fixture
def store(tmp_path):
    write(tmp_path, {"a.jsonl": lines(*asked(60))})
    assert run("--input", tmp_path, "--records", "--output", tmp_path / "s") == 0
    return tmp_path / "s"


def test_it_is_trained_on(store):
    reader = StoreReader(store)
    dataset = open_store(store, validation_fraction=0.0, isolate_documents=False)
    assert ", loss mask" in dataset.description
    count = dataset.num_windows
    targets = dataset.batch(0, range(count), count)["targets"]
    learnt = int(reader.learn.sum())
    assert learnt - reader.num_documents < (targets >= 0).sum() <= learnt < reader.num_tokens


def test_a_store_without_its_mask_is_refused(store):
    mask = store.with_name("s.mask.bin")
    whole = mask.read_bytes()
    size = len(whole)
    for content, words in (
        (whole[:-1], f"s.mask.bin: is cut short: it has {size - 1} bytes, s.idx makes it {size}"),
        (whole + b"\1", "s.mask.bin: goes on after its end"),
        (b"", f"s.mask.bin: is cut short: it has 0 bytes, s.idx makes it {size}"),
        (None, "s.mask.bin: no such file; it is the store's loss mask and has to be copied with it"),
    ):
        mask.unlink()
        if content is not None:
            mask.write_bytes(content)
        else:
            mask.unlink(missing_ok=True)
        assert one_line(open_store, store).startswith(f"config.data.path: {store.parent}/{words}")
        mask.write_bytes(b"")


def test_options_that_exclude_each_other(tmp_path, capsys):
    write(tmp_path, {"a.jsonl": lines(*asked(5))})
    base = ("--input", tmp_path / "a.jsonl", "--output", tmp_path / "store", "--records")
    assert refused(capsys, *base, "--text_field", "prompt").startswith("--text_field: --records has fields of its own")
    assert refused(capsys, *base, "--no-append_eod").startswith("--no-append_eod: the end of a response is learnt")
    assert nothing_written(tmp_path)
    assert run(*base) == 0
    there = "store.mask.bin' is there already; name another".replace("'", "")
    assert there in refused(capsys, *base[:-1], "--text_field", "prompt")
    assert run(*base) == 0 and run(*base[:-1], "--text_field", "prompt", "--overwrite") == 2  # a row without prompt
    assert StoreReader(tmp_path / "store").learn is not None
