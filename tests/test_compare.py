"""A run beside published milestones."""

import json
from pathlib import Path

import pytest

from hybrid_jax import compare, config_file
from hybrid_jax import config as config_lib
from hybrid_jax.errors import UserError
from hybrid_jax.evaluation import results

CONFIGS = Path(__file__).parent.parent / "configs"
NAMES = sorted(path.stem for path in (CONFIGS / "milestones").glob("*.json"))


def write_run(folder, losses, **config):
    lines = [json.dumps({"step": s, "loss": loss, "tokens_per_second": 1000.0 + s}) for s, loss in losses.items()]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if config:
        (folder / "config.json").write_text(json.dumps({"train": config}))


def test_milestones_belong_to_configs_and_to_their_recipes():
    assert set(NAMES) == {"gdn_300m", "kda_300m", "hybrid_gdn_300m", "hybrid_mamba2_300m", "gdn_1b"}
    for name in NAMES:
        milestones, train = compare.load_milestones(name), config_file.load(f"{CONFIGS / name}.py").train
        assert milestones["steps"] == train.steps
        assert milestones["tokens_per_step"] == train.global_batch_size * train.sequence_length
        assert set(milestones["loss"]) | set(milestones["tokens_per_second"]) <= set(milestones["sources"])
        for series in milestones["loss"].values():
            steps = list(map(int, series))
            assert steps == sorted(steps)
            assert 1 <= steps[0]
            assert steps[-1] <= milestones["steps"]
            assert list(series.values()) == sorted(series.values(), reverse=True)
        assert set(milestones["zero_shot"]) <= set(milestones["sources"])
        assert len(milestones["zero_shot"]["MI355X"]) == 7
        scores = [score for of in milestones["zero_shot"].values() for task in of.values() for score in task.items()]
        assert all(metric in ("acc", "acc_norm") and 0.15 < value < 0.75 for metric, value in scores)


def test_published_values():
    gdn, kda = (compare.load_milestones(name)["loss"] for name in ("gdn_300m", "kda_300m"))
    assert gdn["MI300X"]["1000"] == 4.050
    assert gdn["MI355X"]["4768"] == 3.411
    assert kda["MI300X"]["4700"] == 3.3624
    assert kda["MI355X"]["4768"] == 3.407
    assert compare.load_milestones("gdn_1b")["loss"]["MI355X"]["95368"] == 2.487


def test_the_table_shows_both_and_their_difference(tmp_path, capsys):
    write_run(tmp_path, {1: 11.9752, 100: 9.7, 500: 4.728, 995: 4.0}, global_batch_size=1024, sequence_length=2048)
    assert compare.main([str(tmp_path), "--to", "gdn_300m"]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line[:1].isdigit()}
    assert rows["1"] == ["11.9752", "11.9652", "+0.0100"]
    assert rows["100"] == ["9.7000", "9.6010", "+0.0990", "7.4710", "+2.2290"]
    assert rows["500"] == ["4.7280", "4.7280", "+0.0000"]
    assert rows["1,000"] == ["4.0000", "4.0500", "-0.0500"]  # 995 is within 1%
    assert rows["2,000"] == ["-", "3.6140"]
    assert "equal steps are not equal tokens" not in out
    assert "1,465,704" in out


def test_accuracies_of_the_newest_evaluation_stand_beside_the_published_ones(tmp_path, capsys):
    write_run(tmp_path, {1: 11.9})
    assert compare.main([str(tmp_path), "--to", "kda_300m"]) == 0
    before = capsys.readouterr().out.splitlines()
    at = before.index("zero-shot, published")
    assert before[at + 1].split("  ")[-1] == "FLA acc_norm" and before[at + 3].split()[1:3] == ["0.4823", "0.4335"]
    metrics = {"acc": {"value": 0.5, "stderr": 0.01}}
    found = results.as_json(
        {"step": 1200}, "", tasks={"piqa": {"num_fewshot": 0, "documents": 9, "version": 1, "metrics": metrics}}
    )
    path = results.place(tmp_path, 1200, None)
    path.parent.mkdir()
    path.write_text(results.text(found))
    assert compare.main([str(tmp_path), "--to", "kda_300m"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("zero-shot (this run at step 1,200)")
    rows = {line.split()[0]: line.split()[1:] for line in lines[at + 3 :]}
    assert rows["piqa"] == ["0", "0.5000", "0.0100", "0.6077", "0.6121", "0.6034", "0.6099"]
    assert rows["mmlu"] == ["0.2312", "0.2288"]


def test_the_published_model_is_known_by_its_sizes():
    for name in NAMES:
        config = config_lib.to_dict(config_file.load(f"{CONFIGS / name}.py", (("model.remat", "full"),)))
        assert compare.of_model(config) == name
        config["model"]["vocab_size"] += 1
        assert compare.of_model(config) == ""


def test_what_was_rolled_back_is_left_out(tmp_path):
    write_run(tmp_path, {1: 5.0, 2: 4.0, 3: 90.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        for line in (
            {"step": 3, "event": "rollback", "to_step": 1},
            {"step": 2, "loss": 3.9},
            {"step": 3, "loss": 3.8},
        ):
            file.write(json.dumps(line) + "\n")
    assert [(x["step"], x["loss"]) for x in compare.load_run(tmp_path)] == [(1, 5.0), (2, 3.9), (3, 3.8)]


def test_a_run_with_other_steps_is_told_apart(tmp_path, capsys):
    write_run(tmp_path, {1: 12.0}, global_batch_size=8, sequence_length=128)
    compare.main([str(tmp_path), "--to", "kda_300m"])
    assert "Its step has 1,024 tokens, the published one 2,097,152" in capsys.readouterr().out


def test_a_loss_that_is_not_finite_or_not_near_is_not_shown():
    lines = [{"step": 100, "loss": None}, {"step": 102, "loss": 5.0}, {"step": 500, "loss": 3.0}]
    assert compare.loss_at(lines, 101) == 5.0
    assert compare.loss_at(lines, 100) is None
    assert compare.loss_at(lines, 400) is None
    assert compare.loss_at(lines, 496) == 3.0


def test_mistakes_are_one_line(tmp_path, capsys):
    with pytest.raises(UserError, match="--to: nothing is published under 'gdn_30m'; did you mean gdn_300m"):
        compare.load_milestones("gdn_30m")
    for arguments, words in [
        ([str(tmp_path / "none"), "--to", "gdn_300m"], "no such run"),
        ([str(tmp_path), "--to", "gdn_300m"], "holds no metrics.jsonl with a step in it"),
        ([str(tmp_path), "--to", "xyz"], "nothing is published under 'xyz'"),
    ]:
        assert compare.main(arguments) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ")
        assert words in err
        assert err.count("\n") == 1


def test_a_run_of_another_model_is_told(tmp_path, capsys):
    write_run(tmp_path, {1: 11.0})
    same = config_lib.to_dict(config_file.load(f"{CONFIGS / 'gdn_300m'}.py"))
    (tmp_path / "config.json").write_text(json.dumps(same))
    assert compare.main([str(tmp_path), "--to", "gdn_300m"]) == 0
    assert "not comparable" not in capsys.readouterr().out
    same["model"]["vocab_size"], same["data"]["source"] = 320, "python"
    (tmp_path / "config.json").write_text(json.dumps(same))
    assert compare.main([str(tmp_path), "--to", "gdn_300m"]) == 0
    assert capsys.readouterr().out.endswith(
        "Its config differs in model.vocab_size, data.source: the losses are not comparable.\n"
    )
