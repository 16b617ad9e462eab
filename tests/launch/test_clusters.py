"""What clusters are given: scripts that a shell, Kubernetes and Python can read, with the ranks they need."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tiny import write_all
from tunesmith.cli.main import main
from tunesmith.errors import UserError
from tunesmith.launch.clusters import (
    Task,
    host_commands,
    kubeflow_manifest,
    kubernetes_manifest,
    ray_driver,
    skypilot_task,
    slurm_script,
)

COMMAND = ["python", "-m", "tunesmith", "train", "my run.yaml", "learning_rate=1e-4"]


def task(**changes) -> Task:
    given = {"command": COMMAND, "name": "support", "folder": "/data/my work", "output": "runs/support"}
    return Task(**given | {"nodes": 2, "ranks": 4} | changes)


def test_a_slurm_script_is_one_that_bash_reads_and_asks_for_what_the_run_needs():
    script = slurm_script(task(options=["partition=gpu", "--exclusive"]), hours=1.5)
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    asked = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2] for line in script.splitlines() if "#SBATCH" in line
    )
    assert asked["nodes"] == "2"
    assert asked["ntasks-per-node"] == asked["gpus-per-node"] == "4"
    assert asked["time"] == "1:30:00"
    assert asked["partition"] == "gpu"
    assert "exclusive" in asked
    assert "requeue" in asked
    assert shlex.join(COMMAND) in script
    assert "gpus" not in slurm_script(task(has_gpus=False), hours=1)


def test_the_warning_before_the_time_limit_leaves_time_to_train():
    assert "--signal=TERM@30\n" in slurm_script(task(), hours=1 / 60)
    assert "--signal=TERM@180\n" in slurm_script(task(), hours=24)


def test_the_wrapper_around_a_rank_passes_codes_on_but_takes_a_stop_as_asked_for_no_failure():
    script = slurm_script(task(), hours=1)
    wrapper = script.partition("bash -c '")[2].partition("' rank")[0]
    for code, expected in ((0, 0), (1, 1), (70, 70), (143, 0)):
        done = subprocess.run(["bash", "-c", wrapper, "rank", sys.executable, "-c", f"raise SystemExit({code})"])
        assert done.returncode == expected


def test_the_wrapper_around_a_rank_waits_while_a_signalled_rank_saves():
    wrapper = slurm_script(task(), hours=1).partition("bash -c '")[2].partition("' rank")[0]
    saves = (
        "import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(0.5), sys.exit(143))); "
        "print(1, flush=True); time.sleep(30)"
    )
    process = subprocess.Popen(
        ["bash", "-c", wrapper, "rank", sys.executable, "-c", saves], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout.readline()
    subprocess.run(["pkill", "-TERM", "-g", str(process.pid)])
    assert process.wait(20) == 0


def test_a_kubernetes_manifest_has_a_pod_for_each_node_which_find_each_other():
    service, job = yaml.safe_load_all(
        kubernetes_manifest(task(), image="here/tunesmith:1", claim="data", mount="/data")
    )
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert service["spec"]["clusterIP"] == "None"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["subdomain"] == service["metadata"]["name"] == "support"
    assert container["image"] == "here/tunesmith:1"
    assert "--rdzv-endpoint=support-0.support:29400" in container["command"]
    assert container["command"][-4:] == ["tunesmith", "train", "my run.yaml", "learning_rate=1e-4"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    with pytest.raises(UserError, match="no name for Kubernetes"):
        kubernetes_manifest(task(name="My_Run"), image="i", claim="c", mount="/m")


def test_a_train_job_and_its_runtime_have_the_nodes_the_ranks_and_the_volume():
    runtime, job = yaml.safe_load_all(kubeflow_manifest(task(), image="here/tunesmith:1", claim="data", mount="/data"))
    assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
    assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == 4
    assert trainer["command"] == ["python", "-m", "torch.distributed.run", "--max-restarts=3", *COMMAND[1:]]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    assert replicated["name"] == pod["containers"][0]["name"] == "node"  # what the Trainer looks for
    assert {one["name"] for one in pod["volumes"]} == {one["name"] for one in pod["containers"][0]["volumeMounts"]}
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "data"
    with pytest.raises(UserError, match="no name for Kubernetes"):
        kubeflow_manifest(task(name="My_Run"), image="i", claim="c", mount="/m")


@pytest.mark.slow
def test_kubeflows_own_types_know_all_that_a_train_job_says():
    models = pytest.importorskip("kubeflow_trainer_api.models")
    kinds = (models.TrainerV1alpha1TrainingRuntime, models.TrainerV1alpha1TrainJob)
    made = yaml.safe_load_all(kubeflow_manifest(task(), image="here/tunesmith:1", claim="data", mount="/data"))
    for content, kind in zip(made, kinds, strict=True):
        assert without_empty(kind.from_dict(content).to_dict()) == without_empty(content)


def without_empty(value):
    if isinstance(value, dict):
        return {name: without_empty(one) for name, one in value.items() if one not in (None, {}, [])}
    return [without_empty(one) for one in value] if isinstance(value, list) else value


def test_a_skypilot_task_runs_torchrun_by_the_places_that_skypilot_tells():
    given = {"accelerator": "A100-80GB", "image": "here/tunesmith:1", "volume": "data", "mount": "/data"}
    made = yaml.safe_load(skypilot_task(task(options=["infra=kubernetes", "use_spot=true"]), **given))
    assert made["num_nodes"] == 2
    assert made["resources"]["accelerators"] == "A100-80GB:4"
    assert made["resources"]["infra"] == "kubernetes"
    assert made["resources"]["use_spot"] is True
    assert made["volumes"] == {"/data": "data"}
    echoing = made["run"].replace("exec python", "exec echo").replace("cd '/data/my work'", "true")
    places = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2"}
    said = subprocess.run(["bash", "-c", echoing], env=places, capture_output=True, text=True, check=True).stdout
    assert "--nnodes=2 --nproc-per-node=4 --node-rank=1 --master-addr=10.0.0.1 " in said
    assert said.endswith("-m tunesmith train my run.yaml learning_rate=1e-4\n")
    assert "cpus" in yaml.safe_load(skypilot_task(task(has_gpus=False), **given))["resources"]


def test_a_ray_driver_is_a_program_with_a_worker_for_each_rank():
    source = ray_driver(task(folder='/data/a "b"'))
    compile(source, "driver.py", "exec")
    assert "RANKS = 8\n" in source
    assert "RANKS_OF_A_NODE = 4\n" in source
    assert "HAS_GPUS = True\n" in source


def test_the_page_has_the_files_as_they_are_written():
    page = (Path(__file__).parents[2] / "docs" / "launching.md").read_text()
    run = {"command": [*COMMAND[:4], "run.yaml"], "nodes": 2, "ranks": 8}
    there, mounted = task(**run, folder="/data/support"), task(**run, folder="/work")
    image = "registry.example/tunesmith:0.1.0"
    places = {"image": image, "claim": "work", "mount": "/work"}
    for text in (
        slurm_script(there, hours=4),
        kubernetes_manifest(mounted, **places),
        kubeflow_manifest(mounted, **places),
        ray_driver(there),
        skypilot_task(mounted, accelerator="H100", image=image, volume="work", mount="/work"),
    ):
        assert f"\n{text}```\n" in page


@pytest.mark.slow
@pytest.mark.distributed
def test_ray_train_starts_two_ranks_which_train_as_one_would(runs, tiny_model, tmp_path):
    pytest.importorskip("ray")
    settings = {"steps": 3, "lora": {"rank": 4}}  # dropout is drawn on each rank
    whole, spread = (write_all(tmp_path / name, tiny_model, **settings) for name in ("whole", "spread"))
    assert runs(whole, "train", "run.yaml").code == 0
    assert runs(spread, "launch", "ray", "run.yaml", "--ranks", "2", "--cpu", "--out", "driver.py").code == 0
    done = subprocess.run([sys.executable, "driver.py"], cwd=spread, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    plan = json.loads((spread / "run" / "plan.json").read_text())
    assert plan["mesh"]["replicate"] * plan["mesh"]["shard"] == 2, plan["mesh"]
    one, two = (json.loads((folder / "run" / "summary.json").read_text()) for folder in (whole, spread))
    assert two["held_out_after"] == pytest.approx(one["held_out_after"], rel=1e-4)


def test_hosts_are_reached_as_said_and_the_first_one_leads():
    first, second = host_commands(task(), ["me@a", "b"], "ssh -tt {host}")
    assert first[:3] == ["ssh", "-tt", "me@a"]
    assert "--rdzv-endpoint=a:29400 " in first[3]
    assert "is_host=1" in first[3]
    assert "is_host=0" in second[3]
    assert first[3].startswith("cd '/data/my work' && exec ")
    assert host_commands(task(), ["x"], "ip netns exec {host}")[0][:5] == ["ip", "netns", "exec", "x", "bash"]
    with pytest.raises(UserError, match=r"\{host\}"):
        host_commands(task(), ["a"], "ssh")


def test_launch_reads_the_settings_first_and_writes_beside_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("model: m\ndata: d.jsonl\noutput: runs/My Run\n")
    with pytest.raises(SystemExit) as ended:
        main(["launch", "slurm", "run.yaml", "learning_rte=1"])
    assert ended.value.code == 1
    assert "learning_rate" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["launch", "kubernetes", "run.yaml"])
    assert ended.value.code == 0
    assert "name: my-run\n" in (tmp_path / "run.kubernetes.yaml").read_text()
    with pytest.raises(SystemExit):
        main(["launch", "hosts", "run.yaml", "--hosts", "a", "--plan", "my plan.json", "--print"])
    assert "my plan.json" in capsys.readouterr().out
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit) as ended:
        main(["launch", "ray", "run.yaml", "--submit"])
    assert ended.value.code == 1
    assert "ray is not here" in capsys.readouterr().err
