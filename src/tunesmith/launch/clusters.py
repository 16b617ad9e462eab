"""Cluster templates: one job on several machines, as text. Commands for hosts, a script for Slurm, manifests
for Kubernetes and Kubeflow, a driver for Ray Train, a task for SkyPilot. Nothing is started here.

In each the ranks get torchrun's environment and run `tunesmith train`, which continues an unfinished run; so whatever
starts them again after a pre-emption or a failure resumes it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from tunesmith.errors import UserError

PORT = 29400
WARNING_SECONDS = 180
"""Before a time limit: to save in."""
RESTARTS = 3
"""After failures that are no pre-emption."""


@dataclass(frozen=True)
class Task:
    """A run on several nodes."""

    command: Sequence[str]
    """What each rank runs."""
    name: str
    folder: str
    """Where it is started, the same on every node."""
    output: str
    """The run's folder, as its settings say."""
    nodes: int
    ranks: int
    """On each node."""
    has_gpus: bool = True
    options: Sequence[str] = field(default_factory=tuple)
    """Further settings of the cluster, as KEY=VALUE."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks < 1:
            raise UserError(f"nodes ({self.nodes}) and ranks ({self.ranks}) must be 1 or more.")


def host_commands(task: Task, hosts: Sequence[str], reach: str, *, address: str | None = None) -> list[list[str]]:
    """One command for each host, to be run at the same time from here. `reach` runs a command on a `{host}`; the ranks
    meet at `address`, the first host when left out."""
    if "{host}" not in reach:
        raise UserError(f"--reach '{reach}' does not say where {{host}} goes, as in 'ssh {{host}}'.")
    made = []
    for number, host in enumerate(hosts):
        ranks = _torchrun(task, address or hosts[0].rpartition("@")[2], f"--rdzv-conf=is_host={number == 0:d}")
        words = f"cd {shlex.quote(task.folder)} && exec {shlex.join(ranks)}"
        # What is reached by ssh goes through a shell there, which takes the words apart once more.
        tail = [words] if reach.split()[0].endswith("ssh") else ["bash", "-c", words]
        made.append([part.replace("{host}", host) for part in shlex.split(reach)] + tail)
    return made


def slurm_script(task: Task, *, hours: float) -> str:
    """For `sbatch`. Warned before its time is over, or pre-empted, the run saves, is queued again and continues."""
    minutes = max(1, round(hours * 60))
    options = {
        "job-name": shlex.quote(task.name),
        "nodes": task.nodes,
        "ntasks-per-node": task.ranks,
        **({"gpus-per-node": task.ranks} if task.has_gpus else {}),
        "time": f"{minutes // 60}:{minutes % 60:02}:00",
        "signal": f"TERM@{min(WARNING_SECONDS, minutes * 30)}",
        "requeue": None,
        "open-mode": "append",
        "output": shlex.quote(f"{task.output}/slurm.log"),
        **_pairs(task.options),
    }
    lines = [f"#SBATCH --{name}" + ("" if value is None else f"={value}") for name, value in options.items()]
    done = shlex.quote(f"{task.output}/summary.json")
    return f"""#!/bin/bash
# Written by `tunesmith launch slurm`. Pre-empted or short of time, the run saves, is queued again and continues.
{chr(10).join(lines)}

trap : TERM  # the ranks save; this script waits for them
cd {shlex.quote(task.folder)} || exit 1
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
WORLD_SIZE=$SLURM_NTASKS
LOCAL_WORLD_SIZE={task.ranks}
export MASTER_ADDR MASTER_PORT WORLD_SIZE LOCAL_WORLD_SIZE

# A rank that fails ends the others at once. One that saved and stopped, as it was asked to, did not fail (143).
srun --kill-on-bad-exit=1 bash -c '
  trap : TERM
  RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID "$@" &
  wait $!; code=$?
  while kill -0 $! 2>/dev/null; do wait $!; code=$?; done
  [ $code -eq 143 ] && exit 0
  exit $code
' rank {shlex.join(task.command)}
code=$?
if [ $code -eq 0 ] && [ ! -e {done} ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


def kubernetes_manifest(task: Task, *, image: str, claim: str, mount: str) -> str:
    """For `kubectl apply`: an indexed job, a pod for each node, and the service by which the pods find each other."""
    import yaml

    _check_kubernetes_name(task)
    resources = {"limits": {"nvidia.com/gpu": task.ranks}} if task.has_gpus else {}
    container = {
        "name": "train",
        "image": image,
        "command": _torchrun(task, f"{task.name}-0.{task.name}"),
        "workingDir": task.folder,
        "ports": [{"containerPort": PORT}],
        "resources": resources,
        "volumeMounts": _mounts(mount),
    }
    pod = {
        "subdomain": task.name,
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": WARNING_SECONDS,
        "containers": [container],
        "volumes": _volumes(claim),
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": task.name},
        # Pods must find the first one before it is ready: they make each other so.
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": task.name},
            "ports": [{"port": PORT}],
        },
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": task.name},
        "spec": {
            "completions": task.nodes,
            "parallelism": task.nodes,
            "completionMode": "Indexed",
            # Every pre-emption counts as a failure of the pods it ends.
            "backoffLimit": 100 * task.nodes,
            "template": {"metadata": {"labels": {"job-name": task.name}}, "spec": pod},
        },
    }
    head = "# Written by `tunesmith launch kubernetes`. Pods that are ended and started again continue the run.\n"
    return head + "---\n".join(yaml.safe_dump(part, sort_keys=False, width=110) for part in (service, job))


def kubeflow_manifest(task: Task, *, image: str, claim: str, mount: str) -> str:
    """For `kubectl apply` where Kubeflow's Trainer is installed: a TrainJob, and the runtime that it runs in, which
    has the volumes. The Trainer tells torchrun of nodes, ranks and where they meet (PET_NNODES and others)."""
    import yaml

    _check_kubernetes_name(task)
    group = "trainer.kubeflow.org"
    pod = {
        "terminationGracePeriodSeconds": WARNING_SECONDS,
        "containers": [{"name": "node", "image": image, "workingDir": task.folder, "volumeMounts": _mounts(mount)}],
        "volumes": _volumes(claim),
    }
    node = {
        "name": "node",
        "template": {
            "metadata": {"labels": {f"{group}/trainjob-ancestor-step": "trainer"}},
            "spec": {"template": {"spec": pod}},
        },
    }
    runtime = {
        "apiVersion": f"{group}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": task.name, "labels": {f"{group}/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": task.nodes, "torch": {}},  # ranks are the job's to say
            # A pod that is lost, pre-empted too, has all of them started again: ranks of a run begin together.
            "template": {"spec": {"failurePolicy": {"maxRestarts": 100}, "replicatedJobs": [node]}},
        },
    }
    python, *rest = task.command
    trainer = {
        "numNodes": task.nodes,
        "numProcPerNode": task.ranks,
        "image": image,
        "command": [python, "-m", "torch.distributed.run", f"--max-restarts={RESTARTS}", *rest],
        **({"resourcesPerNode": {"limits": {"nvidia.com/gpu": task.ranks}}} if task.has_gpus else {}),
    }
    job = {
        "apiVersion": f"{group}/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": task.name},
        "spec": {"runtimeRef": {"apiGroup": group, "kind": "TrainingRuntime", "name": task.name}, "trainer": trainer},
    }
    head = "# Written by `tunesmith launch kubeflow`. Pods that are ended and started again continue the run.\n"
    return head + "---\n".join(yaml.safe_dump(part, sort_keys=False, width=110) for part in (runtime, job))


def _check_kubernetes_name(task: Task) -> None:
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?", task.name):
        raise UserError(
            f"'{task.name}' is no name for Kubernetes: small letters, digits and dashes, at most 52; say --name."
        )


def _mounts(mount: str) -> list[dict[str, str]]:
    return [{"name": "work", "mountPath": mount}, {"name": "shared-memory", "mountPath": "/dev/shm"}]


def _volumes(claim: str) -> list[dict[str, object]]:
    return [
        {"name": "work", "persistentVolumeClaim": {"claimName": claim}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]


def skypilot_task(task: Task, *, accelerator: str, image: str, volume: str, mount: str) -> str:
    """For `sky jobs launch`, which brings machines up again that were taken away."""
    import yaml

    python, *rest = task.command
    ranks = [
        *(python, "-m", "torch.distributed.run", "--nnodes=$SKYPILOT_NUM_NODES", f"--nproc-per-node={task.ranks}"),
        *("--node-rank=$SKYPILOT_NODE_RANK", "--master-addr=$FIRST", f"--master-port={PORT}"),
        *(f"--max-restarts={RESTARTS}", *map(shlex.quote, rest)),
    ]
    wanted = {"accelerators": f"{accelerator}:{task.ranks}"} if task.has_gpus else {"cpus": f"{task.ranks}+"}
    run = f"""cd {shlex.quote(task.folder)}
FIRST=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
exec {" ".join(ranks)}
"""
    made = {
        "name": task.name,
        "num_nodes": task.nodes,
        "resources": {
            **wanted,
            "image_id": f"docker:{image}",
            # Machines that are taken away are no errors: they are always replaced.
            "job_recovery": {"max_restarts_on_errors": RESTARTS},
            **{name: yaml.safe_load(value or "true") for name, value in _pairs(task.options).items()},
        },
        "volumes": {mount: volume},
        "run": run,
    }
    blocks = type("Blocks", (yaml.SafeDumper,), {})
    blocks.add_representer(str, _as_block)
    head = "# Written by `tunesmith launch skypilot`. Machines that are replaced continue the run.\n"
    return head + yaml.dump(made, Dumper=blocks, sort_keys=False, width=110)


def ray_driver(task: Task) -> str:
    """For `ray job submit`: a program that has Ray Train start the ranks, and again where they fail."""
    return f'''"""Written by `tunesmith launch ray`. Started again after a failure, it continues the run."""

import os
import socket
import subprocess

import ray
import torch.distributed
from ray import train
from ray.train.torch import TorchConfig, TorchTrainer

RANKS = {task.nodes * task.ranks}
RANKS_OF_A_NODE = {task.ranks}
HAS_GPUS = {task.has_gpus}
COMMAND = {json.dumps(list(task.command))}
FOLDER = {json.dumps(task.folder)}
STORAGE = {json.dumps(_below(task.folder, task.output, "ray"))}


def rank():
    """What each worker of Ray Train does: one rank of the run, in a process of its own."""
    context = train.get_context()
    place = [None, None]
    if context.get_world_rank() == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            place = [ray.util.get_node_ip_address(), free.getsockname()[1]]
    torch.distributed.broadcast_object_list(place)
    if context.get_local_world_size() != RANKS_OF_A_NODE:
        raise RuntimeError(f"A node got {{context.get_local_world_size()}} ranks, not {{RANKS_OF_A_NODE}}.")
    environment = {{
        "MASTER_ADDR": place[0],
        "MASTER_PORT": place[1],
        "RANK": context.get_world_rank(),
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
    }}
    environment = {{name: str(value) for name, value in environment.items()}}
    code = subprocess.run(COMMAND, cwd=FOLDER, env=os.environ | environment).returncode
    if code:
        raise RuntimeError(f"Rank {{context.get_world_rank()}} ended with {{code}}.")


def main():
    ray.init()
    TorchTrainer(
        rank,
        torch_config=TorchConfig(backend="gloo"),  # by which the workers agree on a port; the ranks have their own
        scaling_config=train.ScalingConfig(
            num_workers=RANKS,
            use_gpu=HAS_GPUS,
            resources_per_worker={{"CPU": 1, **({{"GPU": 1}} if HAS_GPUS else {{}})}},
        ),
        run_config=train.RunConfig(
            name={json.dumps(task.name)},
            storage_path=STORAGE,
            failure_config=train.FailureConfig(max_failures={RESTARTS}),
        ),
    ).fit()


if __name__ == "__main__":
    main()
'''


def _below(folder: str, output: str, name: str) -> str:
    return str(PurePosixPath(folder) / output / name)


def _as_block(dumper: Any, text: str) -> Any:
    """Text of several lines as it is, one below the other."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


def _torchrun(task: Task, address: str, *options: str) -> list[str]:
    """The ranks of one node. They meet those of the others at `address`, and when one fails all are started again."""
    python, *rest = task.command
    assert rest[0] == "-m", "a module is run"
    return [
        python,
        "-m",
        "torch.distributed.run",
        f"--nnodes={task.nodes}",
        f"--nproc-per-node={task.ranks}",
        f"--max-restarts={RESTARTS}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={address}:{PORT}",
        f"--rdzv-id={task.name}",
        *options,
        *rest,
    ]


def _pairs(options: Sequence[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for option in options:
        name, is_pair, value = option.partition("=")
        found[name.lstrip("-")] = value if is_pair else None
    return found
