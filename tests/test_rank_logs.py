"""Logs by process and level: who writes what where."""

import io
import logging
import re

from hybrid_jax import metrics
from hybrid_jax.rank_logs import RankLogs

DATED = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "


def lines(folder, level):
    path = folder / f"{level}.log"
    text = path.read_text() if path.exists() else ""
    assert all(re.match(DATED, line) for line in text.splitlines())
    return [re.sub(DATED, "", line) for line in text.splitlines()]


def test_a_line_is_in_the_file_of_its_level_and_of_those_below(tmp_path):
    logs = RankLogs(tmp_path, 3)
    assert not list(tmp_path.iterdir())  # nothing before the first line
    for level in ("DEBUG", "INFO", "WARNING", "ERROR"):
        logs.write(level, level.lower())
    logs.write("ERROR", "two\nlines")
    logs.close()
    RankLogs(tmp_path, 3).write("INFO", "of a later start")
    folder = tmp_path / "rank-3"
    last = ["ERROR   error", "ERROR   two", "ERROR   lines"]
    assert lines(folder, "error") == last
    assert lines(folder, "warning") == ["WARNING warning", *last]
    assert lines(folder, "info") == ["INFO    info", "WARNING warning", *last, "INFO    of a later start"]
    assert len(lines(folder, "debug")) == 7


def test_what_cannot_be_written_is_said_once(tmp_path, capsys):
    (tmp_path / "rank-0").write_text("a file")
    logs = RankLogs(tmp_path, 0)
    logs.write("INFO", "lost")
    logs.write("ERROR", "lost too")
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith(f"warning: {tmp_path}/rank-0: ")


def test_pythons_logging_is_kept_and_what_it_printed_it_still_prints(tmp_path, capsys, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", logging.WARNING)
    other = logging.getLogger("of.another.package")
    for rank, show in ((0, True), (1, False)):
        logs = RankLogs(tmp_path, rank)
        with logs.listening(show):
            other.info("small talk")
            other.warning("look")
            other.critical("help")
        other.critical("after the end")
        assert root.handlers == [] and root.level == logging.WARNING
        folder = tmp_path / f"rank-{rank}"
        assert lines(folder, "error") == ["ERROR   of.another.package: help"]
        assert lines(folder, "debug")[0] == "DEBUG   of.another.package: small talk"
        assert lines(folder, "info") == ["WARNING of.another.package: look", "ERROR   of.another.package: help"]
        assert capsys.readouterr().err == ("look\nhelp\n" if show else "") + "after the end\n"


def test_other_handlers_get_what_they_got(tmp_path, monkeypatch):
    root, stream = logging.getLogger(), io.StringIO()
    before = logging.StreamHandler(stream)
    monkeypatch.setattr(root, "handlers", [before])
    monkeypatch.setattr(root, "level", logging.WARNING)
    with RankLogs(tmp_path, 0).listening(show=True):
        logging.getLogger("x").info("small talk")
        logging.getLogger("x").warning("look")
    assert stream.getvalue() == "look\n" and before.level == logging.NOTSET and root.handlers == [before]


def test_a_process_that_prints_nothing_has_its_lines_in_the_log(tmp_path):
    stream, logs = io.StringIO(), RankLogs(tmp_path, 1)
    console = metrics.Console(tmp_path / "train.log", stream, quiet=True, logs=logs)
    console.text("a note", "WARNING")
    console.phase("a phase")
    values = {"loss": 1.0, "learning_rate": 1e-3, "grad_norm": 2.0}
    console.progress(1, 2, values, 1.0)
    logger = logging.Logger("of this test", logging.DEBUG)
    logger.addHandler(console.handler())
    logger.debug("detail")
    logger.error("fault")
    console.close()
    assert stream.getvalue() == "" and not (tmp_path / "train.log").exists()
    kept = [re.sub(r"\[ *[\d.]+ s\] ", "", line) for line in lines(tmp_path / "rank-1", "debug")]
    assert kept == [
        "WARNING a note", "INFO    a phase", "INFO    step 1/2 loss 1.0000 lr 1.00e-03 |g| 2 left 0:01",
        "DEBUG   detail", "ERROR   fault",
    ]  # fmt: skip
