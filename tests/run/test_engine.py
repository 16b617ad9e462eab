"""vLLM answers in steps of a run: with the run's adapter as it is then, until the run ends in whatever way.

Most tests have a stand-in that speaks as vLLM was seen to (`tests/fake_vllm.py`); one needs vLLM itself, on the PATH or
where TUNESMITH_VLLM says.
"""

from __future__ import annotations

import json
import math
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.test_guardian import running, wait_for
from objectives.test_runs import tunesmith
from rollout_tasks import settings_of, write_run
from tiny import TRAIN, Die, Runs
from tiny_model import make_tiny_model
from tunesmith.cli.main import main
from tunesmith.config.load import from_mapping
from tunesmith.errors import UserError
from tunesmith.infer import vllm
from tunesmith.infer.rollout import Sampled, Wanted
from tunesmith.launch import guardian
from tunesmith.plan.hardware import named
from tunesmith.run.choose import new_plan
from tunesmith.run.engine import FOLDER, LOG
from tunesmith.run.folder import Identity
from tunesmith.train import events
from vllm_here import needs_vllm

FAKE = Path(__file__).parents[1] / "fake_vllm.py"
CHOSEN = "tunesmith.infer.vllm:sampled_of"
ROLLOUT = {"engine": "vllm", "prompts": 4, "answers": 4}


@pytest.fixture(scope="module")
def command(tmp_path_factory) -> Path:
    """The stand-in, as a command that writes down its process id."""
    folder = tmp_path_factory.mktemp("vllm")
    path = folder / "vllm"
    path.write_text(f'#!/bin/sh\necho $$ >> {folder}/pids\nexec {sys.executable} {FAKE} "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def faked(command, monkeypatch) -> Path:
    monkeypatch.setenv("TUNESMITH_VLLM", str(command))
    return command


@pytest.fixture(scope="module")
def faked_runs(command, tmp_path_factory) -> Iterator[Runs]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNESMITH_VLLM", str(command))
        runs = Runs(tmp_path_factory.mktemp("cache"))
    yield runs
    runs.close()


def is_stand_in(pid: str) -> bool:
    try:
        return "fake_vllm" in Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has ended, even between opening and reading
        return False


def assert_none_is_left(command: Path) -> None:
    """Of all that were started; they are given the time that a guardian may take."""
    give_up = time.monotonic() + guardian.END_SECONDS + 5
    for pid in (command.parent / "pids").read_text().split():
        while is_stand_in(pid):
            assert time.monotonic() < give_up
            time.sleep(0.05)


def said_at_the_end(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code
    return " ".join(capsys.readouterr().err.split())


def test_a_run_learns_from_answers_of_vllm_with_the_adapter_of_each_step(tiny_model, tmp_path, monkeypatch, faked):
    """That the log-probabilities of sampler and trainer agree in every step shows whose adapter has answered."""
    changes = {"steps": 16, "eval_every": 16, "rollout": {**ROLLOUT, "prompts": 8, "answers": 8}}
    folder = write_run(tmp_path, tiny_model, **changes)
    monkeypatch.chdir(folder)
    tunesmith(list(TRAIN))
    found = events.read(folder / "run")
    first, *_, last = [one["figures"]["reward"] for one in found if one["event"] == "evaluation"]
    assert last > first + 0.2
    steps = [one["figures"] for one in found if one["event"] == "step"]
    assert steps[-1]["reward"] > steps[0]["reward"] + 0.2
    assert len(steps) == 16
    for figures in steps:
        assert 0 < figures["sampler_gap"] <= figures["sampler_gap_largest"] < 1e-4
        assert figures["sampler_capped"] == 0
    assert not (folder / "run" / FOLDER).exists()
    assert (folder / "run" / LOG).exists()
    plan = json.loads((folder / "run" / "plan.json").read_text())
    assert any("not to the same bytes" in one["why"] for one in plan["reasons"])
    assert_none_is_left(faked)


@pytest.mark.parametrize("objective", ["grpo", "rloo"])
def test_how_far_sampler_and_trainer_are_apart_is_said(tiny_model, tmp_path, monkeypatch, faked, objective):
    """A sampler that found each token likelier by 0.5 than the trainer, after several updates, too."""
    monkeypatch.setenv("FAKE_VLLM", json.dumps({"off": 0.5}))
    rollout = {**ROLLOUT, "updates": 2, "temperature": 0.7}
    changes = {"objective": objective, "steps": 1, "eval": [], "held_out": 0, "rollout": rollout}
    folder = write_run(tmp_path, tiny_model, **changes)
    monkeypatch.chdir(folder)
    tunesmith(list(TRAIN))
    (figures,) = [one["figures"] for one in events.read(folder / "run") if one["event"] == "step"]
    assert figures["sampler_gap"] == pytest.approx(0.5, abs=1e-4)
    assert figures["sampler_gap_largest"] == pytest.approx(0.5, abs=1e-4)
    assert figures["sampler_capped"] == 0


def test_a_killed_run_leaves_no_process_and_goes_on(faked_runs, command, tiny_model, tmp_path):
    folder = write_run(tmp_path, tiny_model, steps=4, save_every=1, rollout=ROLLOUT)
    assert faked_runs(folder, *TRAIN, die=Die(CHOSEN, 60)).code == -signal.SIGKILL
    assert_none_is_left(command)
    assert any((folder / "run" / "checkpoints").iterdir())
    ended = faked_runs(folder, *TRAIN)
    assert ended.code == 0, ended.err
    steps = [one for one in events.read(folder / "run") if one["event"] == "step"]
    assert steps[-1]["step"] == 4
    assert max(one["figures"]["sampler_gap_largest"] for one in steps) < 1e-4
    assert not (folder / "run" / FOLDER).exists()
    assert_none_is_left(command)


def test_ctrl_c_while_it_answers_saves_the_run_and_ends_it(faked_runs, command, tiny_model, tmp_path):
    folder = write_run(tmp_path, tiny_model, steps=4, save_every=1, rollout=ROLLOUT)
    ended = faked_runs(folder, *TRAIN, die=Die(CHOSEN, 60, signal=signal.SIGINT))
    assert ended.code == 130, ended.err
    assert any((folder / "run" / "checkpoints").iterdir())
    assert_none_is_left(command)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_ask_the_same_process(tiny_model, tmp_path, monkeypatch, faked):
    """Of three prompts, one rank asks for the answers to two and the other to one."""
    folder = write_run(tmp_path, tiny_model, steps=3, eval_every=3, rollout={**ROLLOUT, "prompts": 3, "updates": 2})
    monkeypatch.chdir(folder)
    tunesmith(["train", "run.yaml", "--ranks", "2"])
    steps = [one["figures"] for one in events.read(folder / "run") if one["event"] == "step"]
    assert len(steps) == 3
    assert max(one["sampler_gap_largest"] for one in steps) < 1e-4
    assert_none_is_left(faked)


@pytest.mark.parametrize(
    ("faults", "why"),
    [
        ({"ends": "no such architecture"}, "vLLM ended before it answered: ValueError: no such architecture. All it"),
        ({"dies_at": 20}, "vLLM ended while it was to answer: RuntimeError: Worker failed, the cache is full. All it"),
        (
            {"off": 1.5},
            "vLLM does not compute the model that is trained: in step 1 its log-probability of a token was 1.5",
        ),
        ({"rejects": True}, "vLLM rejects the run's adapter: LoRA rank 4 is greater than max_lora_rank 8."),
    ],
)
def test_what_vllm_fails_by_is_said(tiny_model, tmp_path, monkeypatch, capsys, faked, faults, why):
    monkeypatch.setenv("FAKE_VLLM", json.dumps(faults))
    monkeypatch.setattr(vllm, "DYING_SECONDS", 5.0)
    folder = write_run(tmp_path, tiny_model, steps=4, rollout=ROLLOUT)
    monkeypatch.chdir(folder)
    assert why in said_at_the_end(capsys, *TRAIN)
    assert_none_is_left(faked)
    assert not (folder / "run" / FOLDER).exists()


def test_vllm_that_is_not_there_is_said_before_anything_is_loaded(tiny_model, tmp_path, monkeypatch, capsys):
    write_run(tmp_path, tiny_model, rollout=ROLLOUT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TUNESMITH_VLLM", "/nowhere/vllm")
    monkeypatch.setattr("tunesmith.run.start.probe_run", None)
    assert "TUNESMITH_VLLM is /nowhere/vllm, which is no command" in said_at_the_end(capsys, *TRAIN)


def test_several_hosts_are_refused(tiny_model, tmp_path, monkeypatch, faked):
    from tunesmith.run.engine import check_engine

    run = from_mapping(settings_of(tiny_model, rollout=ROLLOUT))
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match="ranks of one host"):
        check_engine(run)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"method": "full"}, "it needs method lora"),
        ({"method": "qlora"}, "trains on one in few bits"),
        ({"method": "relora"}, "it needs method lora"),
        ({"lora": {"rank": 4, "dora": True}}, "rejects DoRA"),
        ({"new_tokens": ["<one>"]}, "ignores the embeddings of new_tokens"),
        ({"deterministic": True}, "as deterministic promises"),
        ({"quantization_aware": "int4"}, "not rounded"),
    ],
)
def test_what_vllm_cannot_answer_with_is_refused(tiny_model, changes, why):
    settings = settings_of(tiny_model, rollout=ROLLOUT)
    if changes.get("method") == "full":
        del settings["lora"]
    with pytest.raises(UserError, match=why):
        from_mapping(settings | changes)


def test_distillation_has_no_use_for_it(tiny_model):
    settings = {"model": "m", "data": "d", "objective": "distill", "rollout": {"engine": "vllm"}}
    with pytest.raises(UserError, match=r"rollout\.engine: distillation\.on_policy"):
        from_mapping(settings | {"distillation": {"teacher": "t", "on_policy": 0.5}})


def test_runs_from_before_it_was_a_setting_are_known_again(tiny_model):
    run = from_mapping(settings_of(tiny_model))
    settings = run.model_dump(mode="json")
    before = json.loads(json.dumps(settings))
    del before["rollout"]["engine"]
    courses = [Identity(settings=one, data="d", model="m").course for one in (settings, before)]
    assert courses[0] == courses[1]


def test_the_plan_counts_vllm_beside_the_trainer(tiny_model):
    """Of one GPU, what vLLM is given and what the trainer may use are no more than there is."""
    own, with_engine = (
        new_plan(from_mapping(settings_of(tiny_model, device="cuda", rollout={"engine": one})), named("H100"))
        for one in ("own", "vllm")
    )
    assert own.engine_memory == 0
    assert "rollout" in {one.name for one in own.phases} - {one.name for one in with_engine.phases}
    assert with_engine.memory_limit < own.memory_limit - 2**32
    assert with_engine.engine_memory + with_engine.memory.total == pytest.approx(own.memory_limit, rel=1e-6)


class Slow:
    """A server that takes requests and never answers."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = vllm.Address(self.socket.getsockname()[1], "key")


OPTIONS = {"max_tokens": 4, "temperature": 1.0, "stop_ids": frozenset({2}), "rows": 8}


def test_answers_that_are_not_wanted_any_more_are_given_up_at_once():
    class Stop(Exception):
        pass

    def stop(_: int) -> None:
        if time.monotonic() > began + 1:
            raise Stop

    server, began = Slow(), time.monotonic()
    with pytest.raises(Stop):
        vllm.Client(server.address).answers(
            "a", [[1]], [Wanted(0, str(n)) for n in range(20)], **OPTIONS, should_stop=stop
        )
    assert time.monotonic() < began + 10
    server.socket.close()


def test_a_server_that_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(vllm, "STALLED_SECONDS", 1.0)
    server = Slow()
    with pytest.raises(UserError, match="not ended a single answer in 1 s"):
        vllm.Client(server.address).answers("a", [[1]], [Wanted(0, "s")], **OPTIONS)
    server.socket.close()


def test_answers_are_read_with_their_log_probabilities():
    def said(ids, logps):
        return {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logps}}]}

    ends = frozenset({2})
    assert vllm.sampled_of(said([5, 2], [-1.0, -0.5]), ends, 4) == Sampled([5, 2], True, [-1.0, -0.5])
    assert not vllm.sampled_of(said([5, 6], [-1.0, -0.5]), ends, 2).is_ended
    for ids, logps, why in (
        ([5], [math.nan], "no finite numbers"),
        ([5], [None], "no finite numbers"),
        ([], [], "0 tokens"),
        ([5, 6], [-1.0], "2 tokens with 1 log-prob"),
        (None, [-1.0], "without token ids"),
    ):
        with pytest.raises(UserError, match=why):
            vllm.sampled_of(said(ids, logps), ends, 4)


def test_seeds_differ_in_the_bits_that_torch_looks_at():
    seeds = [vllm.seed_of(f"0:1:2:{n}") for n in range(1000)]
    assert len({seed & 0xFFFFFFFF for seed in seeds}) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.slow
@needs_vllm
def test_vllm_itself_answers_and_the_run_learns(tmp_path, monkeypatch):
    """Its log-probabilities are the trainer's to rounding in fp32, in every step: it has answered with that adapter."""
    model = make_tiny_model(tmp_path / "model", head_dim=32)  # its kernels for CPUs know no smaller one
    changes = {"steps": 16, "eval_every": 16, "rollout": {**ROLLOUT, "prompts": 8, "answers": 8}}
    folder = write_run(tmp_path / "run", model, **changes)
    monkeypatch.chdir(folder)
    tunesmith(list(TRAIN))
    found = events.read(folder / "run")
    first, *_, last = [one["figures"]["reward"] for one in found if one["event"] == "evaluation"]
    assert last > first + 0.3
    steps = [one["figures"] for one in found if one["event"] == "step"]
    assert steps[-1]["reward"] > steps[0]["reward"] + 0.3
    assert max(one["sampler_gap_largest"] for one in steps) < 1e-4
    assert not (folder / "run" / FOLDER).exists()
    wait_for(lambda: not running(model))
