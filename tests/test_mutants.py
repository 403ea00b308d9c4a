"""The table of planted faults still fits the sources; `make mutants` runs it."""

import ast

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant


def test_seventeen_faults():
    assert len({m.name for m in MUTANTS}) == len(MUTANTS) == 17


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_fault_applies(mutant, tmp_path):
    """The text to replace is there exactly once, the result is Python, and the test that must fail exists."""
    copy = tmp_path / mutant.file
    copy.parent.mkdir(parents=True)
    copy.write_text((ROOT / mutant.file).read_text())
    mutant.plant(tmp_path)
    assert ast.dump(ast.parse(copy.read_text())) != ast.dump(ast.parse((ROOT / mutant.file).read_text()))
    path, function = mutant.test.partition("[")[0].split("::")
    tests = ast.parse((ROOT / path).read_text()).body
    assert function in {node.name for node in tests if isinstance(node, ast.FunctionDef)}


def test_text_that_is_not_there_once_is_refused(tmp_path):
    (tmp_path / "file.py").write_text("a = 1\nb = 1\n")
    for text in ("c = 1", "= 1"):
        with pytest.raises(ValueError, match=r"holds the text to replace (0|2) times"):
            Mutant("", "file.py", text, "", "").plant(tmp_path)
    assert (tmp_path / "file.py").read_text() == "a = 1\nb = 1\n"
