"""Tasks by name, file and folder; what is wrong with each is one line. No network, and no model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_jax.errors import UserError
from hybrid_jax.evaluation import library, tasks
from tests.written_tasks import write_choice

pytestmark = pytest.mark.lm_eval
ROOT = Path(__file__).parents[2]
LOCAL = "task: x\noutput_type: multiple_choice\ndataset_path: json\ndataset_kwargs: {data_files: "


@pytest.fixture(autouse=True)
def quiet():
    library.prepare([])


def load(*names, num_fewshot=None):
    return tasks.load([str(name) for name in names], num_fewshot, lambda line: None)


def test_a_file_a_folder_and_a_group(tmp_path):
    choice = write_choice(tmp_path / "one", "first")
    write_choice(tmp_path / "two", "second")
    (tmp_path / "two" / "base.yaml").write_text("output_type: multiple_choice\n")  # to be included: no task
    (tmp_path / "two" / "notes.txt").write_text("task: none")
    assert load(choice).shown == ["first"]
    found = load(tmp_path / "two", choice)
    assert found.shown == ["second", "first"] and set(found.tasks) == {"first", "second"}
    assert {name: task.get_config("num_fewshot") for name, task in found.tasks.items()} == {"first": 0, "second": 0}
    assert load(choice, num_fewshot=2).tasks["first"].get_config("num_fewshot") == 2


def test_a_task_that_says_zero_shots_has_no_others(tmp_path):
    choice = write_choice(tmp_path, "first", num_fewshot=0)
    assert load(choice, num_fewshot=2).tasks["first"].get_config("num_fewshot") == 0


def test_local_tasks_need_no_hub(tmp_path):
    choice = write_choice(tmp_path, "first")
    assert not tasks.needs_hub([str(choice)])
    assert tasks.needs_hub(["arc_easy"])
    other = tmp_path / "other.yaml"
    other.write_text("task: other\ndataset_path: someone/data\n")
    assert tasks.needs_hub([str(other)]) and tasks.needs_hub([str(tmp_path)])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("task: [", "is no valid YAML: while parsing"),
        ("- task", "is no task: it holds no keys"),
        ("output_type: multiple_choice", "is no task: it has neither the key 'task' nor 'group'"),
        ("task: x\noutput_type: chess\ndataset_path: json", "cannot be opened: .*chess"),
        ("task: x\noutput_type: multiple_choice\ndataset_path: json", "its data is no JSON with one example a line: "),
        ("task: x\nthe_answer: 42", "cannot be opened: .*the_answer"),
        (
            f"{LOCAL}/no/file.json}}",
            "cannot be opened: .*/no/file.json",
        ),
        (f"{LOCAL}EMPTY}}", "its data is empty"),
        (f"{LOCAL}{ROOT}/Makefile}}", "its data is no JSON with one example a line: "),
        (None, "no such file or folder"),
    ],
)
def test_a_task_file_that_is_broken(tmp_path, content, said):
    path = tmp_path / "task.yaml"
    if content is not None:
        (tmp_path / "empty.jsonl").touch()
        path.write_text(content.replace("EMPTY", str(tmp_path / "empty.jsonl")))
    with pytest.raises(UserError, match=said) as error:
        load(path)
    assert str(error.value).startswith(f"--tasks: {path}: ") and "\n" not in str(error.value)


def test_a_field_that_the_data_has_not(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "evaluate", None)  # where the harness looks for other metrics, for long
    path = write_choice(tmp_path, "first")
    path.write_text(path.read_text().replace("{{question}}", "{{query}}"))
    with pytest.raises(UserError, match=r"first.yaml: cannot be opened: 'query' is undefined"):
        load(path)
    path.write_text(path.read_text().replace("{{query}}", "{{question}}"))
    for old, new, said in [
        ('test_split: "train"', 'test_split: "test"', "cannot be opened: it names 'test', which is not there"),
        ('"acc_norm"', '"accurate"', "first: its metric 'accurate' is none of lm-evaluation-harness"),
        ('"mean"', '"middle"', "first: the aggregation of its metric 'acc' is none of lm-evaluation-harness"),
    ]:
        other = tmp_path / "other.yaml"
        other.write_text(path.read_text().replace(old, new))
        with pytest.raises(UserError, match=said):
            load(other)
    (tmp_path / "group.yaml").write_text("group: all\ntask: [first, fist]\n")
    said = tasks._strangers(str(tmp_path / "group.yaml"), ["first"])
    assert said.startswith(f"{tmp_path}/group.yaml: its member fist: unknown task; did you mean first; a task of")
    path.write_text(path.read_text() + "unsafe_code: true\n")
    with pytest.raises(UserError, match="first: runs code that the model writes"):
        load(path)
    with pytest.raises(UserError, match=r"holds no \.yaml file with the key 'task' or 'group'"):
        load(ROOT / "configs")


def test_names_of_the_harness_without_network():
    """One process, as what these packages take from their environment they take once."""
    code = (
        "import sys; from hybrid_jax.evaluation import library, tasks\n"
        "names = sys.argv[1:]; library.prepare(names)\n"
        "try: tasks.load(names, None, print)\n"
        "except tasks.TaskErrors as error: print(*error.lines, sep='\\n', file=sys.stderr)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")}
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": "/nonexistent/cache", "PYTHONPATH": str(ROOT)}
    names = ["arc_esy", "openbookqa", "hellaswag", "xyzzy_*"]
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, env=environment)
    lines = done.stderr.splitlines()
    assert len(lines) == 4, done.stderr
    assert lines[0].startswith("--tasks: arc_esy: unknown task; did you mean ") and "arc_easy" in lines[0]
    for line, name in zip(lines[1:3], names[1:3], strict=True):
        assert line.startswith(f"--tasks: {name}: its data is not on this machine, and the Hugging Face hub cannot be")
    assert lines[3] == "--tasks: xyzzy_*: no task of lm-evaluation-harness has such a name"
    assert json.dumps(done.stdout) and "opening hellaswag" in done.stdout
