"""Text files to a token store: faults of the input, memory, and what is shown."""

import io
import os
import subprocess
import sys

import pytest

from hybrid_jax.data import documents, inputs, prepare
from hybrid_jax.data import progress as progress_lib
from hybrid_jax.data.store import StoreReader
from tests.data.test_prepare import (
    ROOT,
    lines,
    nothing_written,
    refused,
    run,
    texts,
    write,
)


def test_text_is_kept_as_it_is_but_for_marks_and_bad_bytes(tmp_path, capsys):
    files = {
        "a.txt": b"\xef\xbb\xbfmarked\r\nlines\r\n",
        "b.txt": b"r\xe9 \xff end \xe2\x82",
        "c.txt": b"",
        "d.txt": b"\xef\xbb\xbf",
        "e.jsonl": b'{"text": ""}\r\n{"text": "\\ud800x"}\n{"text": "\xff"}\n{"text": "\\ud83d\\ude00"}\n',
        "f.txt": " \n",
    }
    write(tmp_path / "in", files)
    assert run("--input", tmp_path / "in", "--output", tmp_path / "store") == 0
    assert texts(tmp_path / "store") == [
        "marked\r\nlines\r\n",
        "r\ufffd \ufffd end \ufffd",
        "\ufffdx",
        "\ufffd",
        "😀",
        " \n",
    ]
    out = capsys.readouterr().out
    assert "3 documents left out, without a token" in out
    assert "3 documents with bytes that are no UTF-8, replaced" in out


def test_fault_in_a_worker_is_the_same_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(prepare, "PART_BYTES", 2**12)
    write(tmp_path / "in", {"a.txt": "x" * 5000, "b.jsonl": "{}\n"})
    message = refused(capsys, "--input", tmp_path / "in", "--output", tmp_path / "store", workers=2)
    assert message.startswith(f"{tmp_path / 'in' / 'b.jsonl'}: line 1: has no field 'text'")


def test_nothing_to_read(tmp_path, capsys):
    write(tmp_path, {"other/x.bin": "a", "blank/x.txt": ""})
    kinds = inputs.ACCEPTED
    for name, what in (
        ("missing", "no such file or folder, and no file matches it"),
        ("*.txt", "no such file or folder, and no file matches it"),
        ("other", f"holds no file that can be read ({kinds} can)"),
        ("other/*", f"holds no file that can be read ({kinds} can)"),
        ("other/x.bin", f"this kind of file cannot be read ({kinds} can)"),
    ):
        message = refused(capsys, "--input", tmp_path / name, "--output", tmp_path / "store")
        assert message == f"--input: {tmp_path / name}: {what}"
    message = refused(capsys, "--input", tmp_path / "blank", "--output", tmp_path / "store")
    assert message == "--input: no document with a token in it"
    assert nothing_written(tmp_path)


def test_unreadable_file_and_folder(tmp_path, capsys, monkeypatch):
    write(tmp_path / "in", {"a.txt": "alpha"})
    (tmp_path / "in" / "b.txt").symlink_to(tmp_path / "gone.txt")
    message = refused(capsys, "--input", tmp_path / "in", "--output", tmp_path / "store")
    assert message == f"{tmp_path / 'in' / 'b.txt'}: No such file or directory"

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", denied)  # permissions do not bind root
    message = refused(capsys, "--input", tmp_path / "in", "--output", tmp_path / "store")
    assert message == f"--input: {tmp_path / 'in'}: Permission denied"
    monkeypatch.undo()
    assert nothing_written(tmp_path)


def test_file_that_changes_meanwhile(tmp_path):
    write(tmp_path, {"a.txt": "alpha"})
    ((span,),) = inputs.cut(inputs.sources([str(tmp_path / "a.txt")]), 100)
    write(tmp_path, {"a.txt": "alpha beta"})
    with pytest.raises(prepare.UserError, match="changed while it was being prepared"):
        list(documents.Reader(documents.Field("text")).documents(span))


@pytest.mark.parametrize("name, package", [("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")])
def test_package_that_is_missing_is_named(tmp_path, capsys, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    write(tmp_path / "in", {name: b"?"})
    message = refused(capsys, "--input", tmp_path / "in", "--output", tmp_path / "store")
    assert message == f"{tmp_path / 'in' / name}: needs a package that is not installed: pip install {package}"


def test_zst(tmp_path, capsys):
    zstandard = pytest.importorskip("zstandard")
    written = [f"{i} " + os.urandom(2000).hex() for i in range(100)]
    pack = zstandard.ZstdCompressor().compress
    half = [lines(*({"text": t} for t in side)).encode() for side in (written[:50], written[50:])]
    raw = b"".join(map(pack, half))  # two frames, as parallel compressors write
    write(tmp_path / "in", {"a.jsonl.zst": raw})
    arguments = ("--input", tmp_path / "in", "--output", tmp_path / "store")
    assert run(*arguments) == 0 and texts(tmp_path / "store") == written
    for bad in (raw[:-10], raw[: len(raw) // 2], b"text", raw + b"text"):
        write(tmp_path / "in", {"a.jsonl.zst": bad})
        message = refused(capsys, *arguments, "--overwrite")
        assert message.startswith(f"{tmp_path / 'in' / 'a.jsonl.zst'}: is damaged and cannot be decompressed (")


def test_parquet(tmp_path, capsys):
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "in" / "a.parquet"
    path.parent.mkdir()
    written = [f"row {i} é" for i in range(1000)]
    arguments = ("--input", path.parent, "--output", tmp_path / "store")
    pyarrow.parquet.write_table(pyarrow.table({"id": range(1000), "text": written}), path, row_group_size=300)
    assert run(*arguments) == 0 and texts(tmp_path / "store") == written
    whole = path.read_bytes()
    for column, what in (
        ({"text": [*written[:400], None]}, "row 401: its field 'text' is null, not a string"),
        ({"text": [1, 2]}, "row 1: its field 'text' is a number, not a string"),
        ({"body": ["a"]}, "has no field 'text' (its fields: body; --text_field names another)"),
    ):
        pyarrow.parquet.write_table(pyarrow.table(column), path)
        assert refused(capsys, *arguments, "--overwrite") == f"{path}: {what}"
    for bad in (whole[:-10], whole[: len(whole) // 2], b"text"):
        path.write_bytes(bad)
        assert refused(capsys, *arguments, "--overwrite").startswith(f"{path}: is not a whole .parquet file: ")


def test_memory_does_not_grow_with_a_document(tmp_path):
    """A document of 200 MB on one line, in a process that may not have that much."""
    with (tmp_path / "a.txt").open("wb") as file:
        for _ in range(200):
            file.write(b"0123456789abcdef" * 62_500)
    code = (
        "import resource, sys; from hybrid_jax.data import prepare\n"
        "base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "limit = 2**29\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))\n"
        "sys.exit(prepare.main(sys.argv[1:]))"
    )
    arguments = ["--input", tmp_path / "a.txt", "--output", tmp_path / "store", "--workers", 1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    reader = StoreReader(tmp_path / "store")
    assert (reader.num_documents, reader.num_tokens) == (1, 200_000_001)
    (tmp_path / "a.txt").unlink()
    (tmp_path / "store.bin").unlink()


def test_progress_is_lines_or_a_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream in (io.StringIO(), Terminal()):
        monkeypatch.setattr(sys, "stderr", stream)
        now = [100.0]
        monkeypatch.setattr(progress_lib.time, "monotonic", lambda now=now: now[0])
        progress = progress_lib.Making(1000, 200, 50, None)
        for _ in range(4):
            now[0] += 10
            progress.add(100, 25)
        progress.close()
        shown = stream.getvalue()
        assert "60%  150 tokens  2.5 tok/s  left 0:40" in shown
        assert ("█" in shown and "\n" not in shown) == stream.isatty()
