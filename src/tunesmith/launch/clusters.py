"""Cluster templates: one job on several machines, as text. Commands for hosts, a script for Slurm, a manifest
for Kubernetes, a driver for Ray. Nothing is started here.

In each the ranks get torchrun's environment and run `tunesmith train`, which continues an unfinished run; so whatever
starts them again after a pre-emption or a failure resumes it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

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

    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?", task.name):
        raise UserError(
            f"'{task.name}' is no name for Kubernetes: small letters, digits and dashes, at most 52; say --name."
        )
    resources = {"limits": {"nvidia.com/gpu": task.ranks}} if task.has_gpus else {}
    container = {
        "name": "train",
        "image": image,
        "command": _torchrun(task, f"{task.name}-0.{task.name}"),
        "workingDir": task.folder,
        "ports": [{"containerPort": PORT}],
        "resources": resources,
        "volumeMounts": [{"name": "work", "mountPath": mount}, {"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    pod = {
        "subdomain": task.name,
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": WARNING_SECONDS,
        "containers": [container],
        "volumes": [
            {"name": "work", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
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


def ray_driver(task: Task) -> str:
    """For `ray job submit`: a program that starts the ranks of a node on each of so many nodes."""
    resources = {"CPU": task.ranks} | ({"GPU": task.ranks} if task.has_gpus else {})
    command = _torchrun(task, "{address}", "--rdzv-conf=is_host={leads}")
    return f'''"""Written by `tunesmith launch ray`. Started again after a failure, it continues the run."""

import os
import signal
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES = {task.nodes}
RESOURCES = {json.dumps(resources)}
COMMAND = {json.dumps(command)}
FOLDER = {json.dumps(task.folder)}


@ray.remote(max_restarts=0)
class Node:
    """The ranks of one node; ended together with it."""

    def address(self):
        return ray.util.get_node_ip_address()

    def run(self, leads, address):
        command = [part.replace("{{leads}}", str(int(leads))).replace("{{address}}", address) for part in COMMAND]
        ranks = subprocess.Popen(command, cwd=FOLDER)
        signal.signal(signal.SIGTERM, lambda number, _: ranks.send_signal(number))
        return ranks.wait()


def main():
    ray.init()
    group = placement_group([RESOURCES] * NODES, strategy="STRICT_SPREAD" if NODES > 1 else "PACK")
    ray.get(group.ready())
    nodes = [
        Node.options(
            num_cpus=RESOURCES["CPU"],
            num_gpus=RESOURCES.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
        ).remote()
        for number in range(NODES)
    ]
    address = ray.get(nodes[0].address.remote())
    codes = ray.get([node.run.remote(number == 0, address) for number, node in enumerate(nodes)])
    sys.exit(max(codes, key=abs))


if __name__ == "__main__":
    main()
'''


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
