"""The store against a reader and a writer made here from the description of the format, with struct alone."""

import itertools
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hybrid_jax import data
from hybrid_jax.config import DataConfig
from hybrid_jax.data.store import StoreReader, StoreWriter
from hybrid_jax.errors import UserError

ROOT = Path(__file__).parents[2]
DOCUMENTS = [[5, 6, 7], [], [65_000], [1, 0, 2, 3, 4, 9, 8], [11, 12], []]
LETTER = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}
HEADER = 9 + 8 + 1 + 8 + 8
VOCABULARY = {8: 65_001, 4: 70_000}  # dtype code, and a vocabulary for which it is chosen


def plain_write(prefix, documents, code, modes=False):
    """documents: of each, the ids of its sequences."""
    size = struct.calcsize(f"<{LETTER[code]}")
    sequences = [sequence for document in documents for sequence in document]
    index, pointers, first, at = [0], [], 0, 0
    for document in documents:
        first += len(document)
        index.append(first)
    for sequence in sequences:
        pointers.append(at)
        at += len(sequence) * size
    with open(f"{prefix}.bin", "wb") as file:
        for sequence in sequences:
            file.write(struct.pack(f"<{len(sequence)}{LETTER[code]}", *sequence))
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<Q", 1) + struct.pack("<B", code))
        file.write(struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(index)))
        file.write(struct.pack(f"<{len(sequences)}i", *map(len, sequences)))
        file.write(struct.pack(f"<{len(sequences)}q", *pointers))
        file.write(struct.pack(f"<{len(index)}q", *index))
        if modes:
            file.write(bytes(len(sequences)))


def plain_read(prefix):
    """(dtype code, the ids of each document)."""
    index, tokens = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    assert struct.unpack_from("<Q", index, 9) == (1,)
    code, count, entries = struct.unpack_from("<BQQ", index, 17)
    at, size = HEADER, struct.calcsize(f"<{LETTER[code]}")
    sizes = struct.unpack_from(f"<{count}i", index, at)
    pointers = struct.unpack_from(f"<{count}q", index, at + 4 * count)
    firsts = struct.unpack_from(f"<{entries}q", index, at + 12 * count)
    assert len(index) == at + 12 * count + 8 * entries
    assert len(tokens) == sum(sizes) * size
    assert firsts[0] == 0 and firsts[-1] == count
    documents = []
    for begin, end in itertools.pairwise(firsts):
        documents.append([])
        for s in range(begin, end):
            documents[-1] += struct.unpack_from(f"<{sizes[s]}{LETTER[code]}", tokens, pointers[s])
    return code, documents


def write(prefix, documents, vocab_size):
    with StoreWriter(prefix, vocab_size=vocab_size) as writer:
        for document in documents:
            writer.append(np.asarray(document, np.int64))


def same(reader, documents):
    assert reader.num_documents == len(documents)
    assert reader.num_tokens == len(reader.tokens) == sum(map(len, documents))
    flat = [token for document in documents for token in document]
    assert reader.tokens.tolist() == flat
    assert reader.tokens[2:9].tolist() == flat[2:9]
    for number, document in enumerate(documents):
        assert reader.document(number).tolist() == document
    numbers = np.arange(len(documents))
    assert reader.lengths(numbers).tolist() == [*map(len, documents)]
    assert reader.first_tokens(numbers).tolist() == np.cumsum([0, *map(len, documents)]).tolist()[:-1]
    assert reader.lengths(numbers).dtype == reader.first_tokens(numbers).dtype == np.int64


def one_line(call, *arguments, **settings):
    with pytest.raises(UserError) as error:
        call(*arguments, **settings)
    message = str(error.value)
    assert "\n" not in message
    return message


# ---- the format ----


@pytest.mark.parametrize("code", [8, 4])
def test_what_is_written_is_the_format(tmp_path, code):
    prefix = tmp_path / "store"
    write(prefix, DOCUMENTS, VOCABULARY[code])
    assert plain_read(prefix) == (code, DOCUMENTS)
    # Byte for byte: a document is one sequence, and none if it is empty.
    plain_write(tmp_path / "plain", [[d] if d else [] for d in DOCUMENTS], code)
    for ending in (".bin", ".idx"):
        assert Path(f"{prefix}{ending}").read_bytes() == (tmp_path / f"plain{ending}").read_bytes()
    reader = StoreReader(prefix)
    assert reader.dtype == reader.tokens.dtype == np.dtype({8: "<u2", 4: "<i4"}[code])
    same(reader, DOCUMENTS)


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 8])
def test_what_others_wrote_is_read(tmp_path, code):
    documents = [[[5, 6, 7]], [], [[100]], [[1, 0], [2], [], [3, 4, 9, 8]], [[]], [[11, 12]]]
    plain_write(tmp_path / "store", documents, code)
    for name in ("store", "store.bin", "store.idx"):
        reader = StoreReader(tmp_path / name)
        same(reader, [[token for sequence in document for token in sequence] for document in documents])
    assert reader.check_ids(101) == 100
    assert not reader.tokens.flags.writeable
    with pytest.raises(IndexError):
        reader.document(6)
    with pytest.raises(IndexError):
        reader.document(-1)


def test_batches_of_documents_equal_one_by_one(tmp_path):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 65_001, n) for n in rng.integers(0, 40, 500)]
    write(tmp_path / "one", documents, 65_001)
    with StoreWriter(tmp_path / "many", vocab_size=65_001) as writer:
        for at in range(0, 500, 70):
            batch = documents[at : at + 70]
            writer.extend(np.concatenate(batch), np.asarray([len(d) for d in batch]))
        assert (writer.num_documents, writer.num_tokens) == (500, sum(map(len, documents)))
        assert sorted(p.suffix for p in tmp_path.glob("*many*")) == [".tmp", ".tmp"]
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"one{ending}").read_bytes() == (tmp_path / f"many{ending}").read_bytes()
    assert len(list(tmp_path.iterdir())) == 4
    same(StoreReader(tmp_path / "many"), [d.tolist() for d in documents])


def test_tables_longer_than_a_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr("hybrid_jax.data.store_index.CHUNK", 3)
    documents = [[n] * (n % 4) for n in range(1, 30)]
    write(tmp_path / "store", documents, 30)
    assert plain_read(tmp_path / "store") == (8, documents)
    same(StoreReader(tmp_path / "store"), documents)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1, "<u2"), (65_535, "<u2"), (65_536, "<i4"), (2**31, "<i4")])
def test_the_dtype_follows_the_vocabulary(tmp_path, vocab_size, dtype):
    write(tmp_path / "store", [[0, vocab_size - 1]], vocab_size)
    reader = StoreReader(tmp_path / "store")
    assert reader.dtype == np.dtype(dtype)
    assert reader.tokens.tolist() == [0, vocab_size - 1]


# ---- what a writer refuses, and what it leaves behind ----


def test_an_exception_or_a_kill_leaves_nothing_under_the_names(tmp_path):
    with pytest.raises(ZeroDivisionError), StoreWriter(tmp_path / "store", vocab_size=10) as writer:
        writer.append(np.arange(10))
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    code = (
        "import os, sys, numpy as np; from hybrid_jax.data.store import StoreWriter\n"
        "with StoreWriter(sys.argv[1], vocab_size=10) as writer:\n"
        "    for _ in range(1000): writer.append(np.arange(10).repeat(1000))\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "store")], cwd=ROOT)
    assert done.returncode == -9
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".tmp", ".tmp"]
    assert all(p.name.startswith(".store.") for p in tmp_path.iterdir())
    write(tmp_path / "store", [[1]], 10)  # and they are in nobody's way
    same(StoreReader(tmp_path / "store"), [[1]])


def test_a_store_is_not_there_before_its_index(tmp_path, monkeypatch):
    replace, order = os.replace, []
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append(Path(b).suffix), replace(a, b)))
    write(tmp_path / "store", [[1]], 10)
    assert order == [".bin", ".idx"]


@pytest.mark.parametrize(("vocab_size", "bad"), [(10, 10), (10, -1), (65_000, 65_001), (70_000, 2**31)])
def test_ids_outside_the_vocabulary_are_not_written(tmp_path, vocab_size, bad):
    with StoreWriter(tmp_path / "store", vocab_size=vocab_size) as writer:
        writer.append(np.asarray([1, 2]))
        message = one_line(writer.extend, np.asarray([3, 4, 5, bad, 6]), np.asarray([2, 0, 1, 2]))
        assert f"document 4 has the id {bad}, not one of the vocabulary's {vocab_size}" in message
        writer.append(np.asarray([7]))
    same(StoreReader(tmp_path / "store"), [[1, 2], [7]])  # nothing of the refused batch


def test_what_a_writer_refuses(tmp_path):
    def nothing():
        with StoreWriter(tmp_path / "store", vocab_size=10) as writer:
            writer.append(np.asarray([], np.int32))

    assert "store.bin: not written: no document with a token was added" in one_line(nothing)
    assert list(tmp_path.iterdir()) == []
    assert "vocabulary of 0" in one_line(StoreWriter, tmp_path / "store", vocab_size=0)
    missing = one_line(StoreWriter(tmp_path / "no" / "store", vocab_size=10).__enter__)
    assert "store.bin: cannot be written: No such file or directory" in missing
    with StoreWriter(tmp_path / "store", vocab_size=10) as writer:
        with pytest.raises(ValueError, match="do not cut 3 tokens"):
            writer.extend(np.asarray([1, 2, 3]), np.asarray([1, 1]))
        with pytest.raises(ValueError, match="integers, of one dimension"):
            writer.append(np.asarray([1.0]))
        writer.append([1, 2])
    with pytest.raises(ValueError, match="use it in a with block"):
        StoreWriter(tmp_path / "other", vocab_size=10).append([1, 2])
    assert "names no file" in one_line(StoreWriter, f"{tmp_path}/", vocab_size=10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store.bin", "store.idx"]
    assert StoreWriter(tmp_path / "other.bin", vocab_size=10).idx == tmp_path / "other.idx"  # as a reader takes it
    before = (tmp_path / "store.bin").read_bytes()
    assert "store.idx: is there already; remove it" in one_line(StoreWriter, tmp_path / "store", vocab_size=10)
    assert (tmp_path / "store.bin").read_bytes() == before


# ---- what a reader refuses ----


def patched(ending, at, form, value):
    def damage(prefix):
        with open(f"{prefix}{ending}", "r+b") as file:
            file.seek(at)
            file.write(struct.pack(form, value))

    return damage


def resized(ending, by):
    return lambda prefix: os.truncate(f"{prefix}{ending}", os.path.getsize(f"{prefix}{ending}") + by)


def removed(ending):
    return lambda prefix: os.unlink(f"{prefix}{ending}")


def rewritten(documents, code=8, **settings):
    return lambda prefix: plain_write(prefix, documents, code, **settings)


# The store that is damaged has 3 sequences of 3, 1 and 2 ids, uint16, one a document: tables at 34, 46 and 70.
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (removed(".idx"), "s.idx: no such file; a token store is a pair PREFIX.bin and PREFIX.idx"),
        (removed(".bin"), "s.bin: no such file"),
        (resized(".idx", -1), "s.idx: is cut short: it has 101 bytes, s.idx makes it 102"),
        (resized(".idx", -80), "s.idx: is cut short within its header"),
        (resized(".idx", -102), "s.idx: is not the index of a token store"),
        (resized(".idx", 1), "s.idx: goes on after its end: it has 103 bytes, s.idx makes it 102"),
        (resized(".bin", -1), "s.bin: is cut short: it has 11 bytes, s.idx makes it 12"),
        (resized(".bin", 2), "s.bin: goes on after its end: it has 14 bytes, s.idx makes it 12"),
        (patched(".idx", 0, "<Q", 7), "s.idx: is not the index of a token store: it does not begin with MMIDIDX"),
        (patched(".idx", 9, ">Q", 1), "s.idx: is big-endian, the format is little-endian; write the store again"),
        (lambda prefix: os.truncate(f"{prefix}.bin", 0), "s.bin: is cut short: it has 0 bytes, s.idx makes it 12"),
        (patched(".idx", 9, "<Q", 2), "s.idx: has version 2 of the format; only version 1"),
        (patched(".idx", 17, "<B", 6), "s.idx: has dtype code 6, floating-point numbers"),
        (patched(".idx", 17, "<B", 9), "s.idx: has the unknown dtype code 9; known are 1, 2, 3, 4, 5, 8"),
        (patched(".idx", 17, "<B", 4), "s.idx: sequence 1 starts at byte 6, but the sizes before it end at 12"),
        (patched(".idx", 18, "<Q", 2**63), "s.idx: is cut short: it has 102 bytes"),
        (patched(".idx", 26, "<Q", 2**64 - 1), "s.idx: is cut short: it has 102 bytes"),
        (patched(".idx", 34, "<i", 2), "s.idx: sequence 1 starts at byte 6, but the sizes before it end at 4"),
        (patched(".idx", 38, "<i", -1), "s.idx: sequence 1 has -1 tokens"),
        (patched(".idx", 42, "<i", 3), "s.bin: is cut short: it has 12 bytes, s.idx makes it 14"),
        (patched(".idx", 54, "<q", 2**40), f"s.idx: sequence 1 starts at byte {2**40}, outside the 12 of s.bin"),
        (patched(".idx", 62, "<q", -8), "s.idx: sequence 2 starts at byte -8, outside the 12 of s.bin"),
        (patched(".idx", 70, "<q", 1), "s.idx: its document index begins with 1, not with 0"),
        (patched(".idx", 78, "<q", 3), "s.idx: its document index falls at entry 2"),
        (patched(".idx", 86, "<q", -1), "s.idx: its document index falls at entry 2"),
        (patched(".idx", 94, "<q", 4), "s.idx: its document index ends at sequence 4, not at 3"),
        (patched(".idx", 94, "<q", 2), "s.idx: its document index ends at sequence 2, not at 3"),
        (rewritten([[[5, 6, 7]], [[1]]], modes=True), "s.idx: is multimodal (a mode for each sequence)"),
        (rewritten([]), "s.bin: holds no token"),
        (rewritten([[], [[]]]), "s.bin: holds no token"),
    ],
)
def test_a_damaged_store_is_one_line(tmp_path, damage, words, monkeypatch):
    prefix = tmp_path / "s"
    plain_write(prefix, [[[5, 6, 7]], [[1]], [[2, 3]]], 8)
    same(StoreReader(prefix), [[5, 6, 7], [1], [2, 3]])
    damage(prefix)
    message = one_line(StoreReader, prefix)
    assert message.startswith(f"{tmp_path}/{words}")
    config = DataConfig(source="store", path=str(prefix))
    assert one_line(data.open, config, sequence_length=4, vocab_size=10, seed=1) == f"config.data.path: {message}"
    monkeypatch.setattr("hybrid_jax.data.store_index.CHUNK", 1)  # what is wrong shows between two pieces
    assert one_line(StoreReader, prefix) == message


def test_a_folder_is_not_a_store(tmp_path):
    (tmp_path / "in").mkdir()
    for name in "bacd":
        write(tmp_path / "in" / name, [[1]], 10)
    message = one_line(StoreReader, f"{tmp_path}/in/")
    there = ", ".join(f"{tmp_path}/in/{name}" for name in "abc")
    assert message.endswith(f"named by PREFIX; {tmp_path}/in is a folder, stores in it: {there} and more")
    (tmp_path / "s.idx").mkdir()
    assert one_line(StoreReader, tmp_path / "s").startswith(f"{tmp_path}/s.idx: is a folder; a token store is a pair")


def test_a_file_that_may_not_be_read_is_one_line(tmp_path, monkeypatch):
    write(tmp_path / "s", [[1]], 10)

    def refuse(path, *arguments, **named):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    assert one_line(StoreReader, tmp_path / "s") == f"{tmp_path}/s.idx: Permission denied"


def test_an_index_without_a_document_index(tmp_path):
    plain_write(tmp_path / "s", [], 8)
    patched(".idx", 26, "<Q", 0)(tmp_path / "s")
    resized(".idx", -8)(tmp_path / "s")
    assert "s.idx: has no document index" in one_line(StoreReader, tmp_path / "s")


def test_ids_over_the_vocabulary_are_found_wherever_they_are(tmp_path):
    tokens = np.zeros(5_000_000, np.int32)
    tokens[4_444_444] = 300
    with StoreWriter(tmp_path / "s", vocab_size=70_000) as writer:
        writer.append(tokens)
    reader = StoreReader(tmp_path / "s")
    for sample in (False, True):  # a sample of a store up to 256 MiB is all of it
        assert reader.check_ids(301, sample=sample) == 300
        message = one_line(reader.check_ids, 300, sample=sample)
        assert "s.bin: token 4444444 is the id 300, not one of 300" in message
    plain_write(tmp_path / "n", [[[1, -2]]], 4)
    assert "n.bin: token 1 is the id -2" in one_line(StoreReader(tmp_path / "n").check_ids, 300)


@pytest.mark.parametrize("code", [4, 5])
def test_a_wide_id_does_not_pass_for_another(tmp_path, monkeypatch, code):
    """2^32 + 1 would be 1 in a batch; so all of an int64 store is read, whatever its size."""
    monkeypatch.setattr("hybrid_jax.data.store._BLOCK_BYTES", 16)
    monkeypatch.setattr("hybrid_jax.data.store._BLOCKS", 2)
    tokens = [1] * 100
    tokens[50] = 2**32 + 1 if code == 5 else 65
    plain_write(tmp_path / "s", [[tokens]], code)
    config = DataConfig(source="store", path=str(tmp_path / "s"))
    if code == 5:
        message = one_line(data.open, config, sequence_length=4, vocab_size=64, seed=1)
        assert message.startswith("config.model.vocab_size: ") and f"token 50 is the id {2**32 + 1}" in message
    else:
        dataset = data.open(config, sequence_length=4, vocab_size=64, seed=1)
        assert dataset.batch(0, range(40), 40)["tokens"].max() == 65  # the trainer's check of each batch finds it


# ---- size ----


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads peak memory from /proc")
def test_a_store_of_more_than_2_31_tokens_opens_fast_in_little_memory(tmp_path):
    count, length = 2_200_000, 1_000
    with (tmp_path / "s.idx").open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, count, count + 1))
        np.full(count, length, "<i4").tofile(file)
        (np.arange(count, dtype="<i8") * (2 * length)).tofile(file)
        np.arange(count + 1, dtype="<i8").tofile(file)
    with (tmp_path / "s.bin").open("wb") as file:
        os.truncate(file.fileno(), 2 * length * count)
        file.seek(2 * (length * count - 2))
        file.write(struct.pack("<2H", 7, 8))
    code = """
import sys, time
from hybrid_jax import data
from hybrid_jax.config import DataConfig
from hybrid_jax.data.store import StoreReader
def peak():
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmHWM"))
before, began = peak(), time.process_time()
reader = StoreReader(sys.argv[1])
assert (reader.num_documents, reader.num_tokens) == (2_200_000, 2_200_000_000) and reader.num_tokens > 2**31
assert reader.document(2_199_999)[-3:].tolist() == reader.tokens[-3:].tolist() == [0, 7, 8]
print(time.process_time() - began, peak() - before)
began = time.process_time()
config = DataConfig(source="store", path=sys.argv[1])
opened = data.open(config, sequence_length=2048, vocab_size=50_000, seed=1)
assert opened.batch(10**6, range(8), 8)["tokens"].shape == (8, 2048)
print(time.process_time() - began, peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "s")], cwd=ROOT, capture_output=True, text=True, check=True
    )
    reading, training = ([float(x) for x in line.split()] for line in done.stdout.splitlines())
    assert reading[0] < 5 and reading[1] < 200e6, reading
    assert training[0] < 5 and training[1] < 200e6, training


def test_positions_beyond_2_31_bytes_are_written(tmp_path, monkeypatch):
    """Sizes that are never stored: what the index says of a store over 2 GiB."""
    with StoreWriter(tmp_path / "s", vocab_size=70_000) as writer:
        writer._files[1].write(np.full(3, 2**30, "<i4").tobytes())
        writer.num_documents, writer.num_tokens = 3, 3 * 2**30
        os.truncate(writer._files[0].fileno(), 3 * 2**32)
    reader = StoreReader(tmp_path / "s")
    assert reader.first_tokens(np.arange(3)).tolist() == [0, 2**30, 2**31]
    assert reader.document(2)[[0, -1]].tolist() == [0, 0]
