"""The choice of a plan before ranks are started."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from parity import write_documents, write_model
from tiny import write_all
from tunesmith.config.load import from_mapping, load
from tunesmith.config.schema import Run
from tunesmith.errors import UserError
from tunesmith.launch.rank_environment import PLAN
from tunesmith.model.probe import probe_run
from tunesmith.run.choose import new_plan, plan_and_data, tokenize, with_findings
from tunesmith.run.start import prepare_run

CODE = """
import sys
from tunesmith.run.choose import launch_plan
from tunesmith.config.load import load
assert launch_plan(load("run.yaml").run, ranks=2).mesh.ranks == 2
print([name for name in ("torch", "transformers") if name in sys.modules])
"""


def test_ranks_do_not_wait_for_libraries_that_their_launcher_has_no_use_for(tiny_model, tmp_path):
    folder = write_all(tmp_path, tiny_model)
    done = subprocess.run([sys.executable, "-c", CODE], cwd=folder, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_ranks_obey_the_plan_that_was_made_to_start_them(tiny_model, tmp_path, monkeypatch):
    folder = write_all(tmp_path, tiny_model)
    monkeypatch.chdir(folder)
    run = load("run.yaml").run
    probed = probe_run(run)[1]
    made = new_plan(run).changed(mesh={"shard": 2}, threads=7)
    monkeypatch.setenv(PLAN, made.model_dump_json())
    assert plan_and_data(run, probed=probed)[0].threads != 7  # nobody started this process as a rank
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    found, data = plan_and_data(run, probed=probed)
    assert found == with_findings(made, probed)
    assert data.train


def test_a_new_run_says_which_fields_of_its_records_are_not_read(tiny_model, tmp_path):
    rows = [{"prompt": f"{n}?", "completion": "Yes.", "source": "web", "id": n + 1} for n in range(30)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"model": str(tiny_model), "data": str(tmp_path / "train.jsonl"), "output": str(tmp_path), "device": "cpu"}
    said: list[str] = []
    prepare_run(from_mapping(given | {"steps": 2, "held_out": 0}), warn=said.append)
    assert [one for one in said if "not read" in one] == ["train: not read of its records: source, id."]


def test_tokens_that_an_embedding_of_the_layers_lacks_are_refused_where_the_data_have_them(tmp_path):
    folder = write_model("gemma4_text", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size_per_layer_input": 50}))
    run = Run(model=str(folder), data=str(write_documents(tmp_path / "train.jsonl")), sequence_length=64, held_out=0)
    assert probe_run(run)[1].spec is not None
    with pytest.raises(UserError, match="vocab_size_per_layer_input 50 and vocab_size 100, and the data have"):
        tokenize(run, None)
