"""launch/ on a real Slurm: munge, slurmctld and several slurmd on this machine.

bash tests/run.sh slurm        ten minutes; needs root, and Debian's slurm-wlm, which it installs
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from conftest import spelling_rows, write_rows

from runtime.checkpoints.lineage import chain, read
from runtime.processes.cluster import ROOT
from support.program import copy, is_alive, ran
from support.slurm import Slurm, slurm

WHY = "bash tests/run.sh slurm runs these"
pytestmark = pytest.mark.skipif(not os.environ.get("GRPO_SLURM"), reason=WHY)
SMALL = """
from configs.tiny import *

steps = {steps}
prompts_per_step = 4
group_size = 4
val_period = {steps}
sampling = {{"max_model_len": 96, "max_response_tokens": 16}}
policy = {{"lr": 1e-3, "warmup_lr": 1e-3, "row_tokens": 128}}
timeouts = {{"start": 180.0, "rollout": 60.0, "train": 60.0, "sync": 30.0}}
"""

# Stands for Python in a job: Ray that does nothing, and a driver that ends as MODE says.
ACTOR = r"""#!/bin/bash
case "$*" in
*submit_check.py*) echo "looks at ${*:2}" ;;
*ray.scripts*) exec sleep 600 ;;
-*) while [ ! -s "$2/head" ]; do sleep 0.2; done ;;
*grpo_async.py*)
    echo "the driver starts"
    case $MODE in
    leaves) trap 'echo saved; exit 0' USR1; for i in {1..600}; do sleep 0.2; done ;;
    refuses) echo "error: too few GPUs" >&2; exit 1 ;;
    dies) echo "error: Trainer died (process 7); traceback: runs/x/t.txt" >&2; exit 1 ;;
    killed) kill -KILL $$ ;;
    esac ;;
esac
"""


# Stands for pyxis: programs of an image are those of this machine, its entry is a stand-in.
CONTAINERS = r"""#!/bin/bash
export SERVICE='echo "$SLURMD_NODENAME serves at $NGINX_PORT" >>serve; exec sleep 600'
words=()
for word; do
    case $word in
    --container-image=*) echo "image ${word#*=} on $SLURM_JOB_NODELIST" >>images ;;
    --container-* | --no-container-*) ;;
    /start-with-nginx.sh) words+=(bash -c "$SERVICE") ;;
    *) words+=("$word") ;;
    esac
done
exec SRUN "${words[@]}"
"""

# Real Ray in a job, beside a driver that does nothing until Slurm warns it.
IDLE = r"""#!/bin/bash
case "${SLURM_JOB_ID:+job} $*" in
job*submit_check.py*) exit 0 ;;
job*grpo_async.py*)
    trap 'exit 0' USR1
    echo "the driver starts"
    for i in {1..600}; do sleep 0.2; done ;;
*) exec PYTHON "$@" ;;
esac
"""


class Home:
    """A copy of the project, from which jobs are submitted."""

    def __init__(self, folder: Path, cluster: Slurm, model: str):
        self.root = copy(folder / "project")
        self.cluster = cluster
        self.model = model
        subprocess.run(["git", "init", "-q"], cwd=self.root, check=True)
        write_rows(self.root / "train.jsonl", spelling_rows(64))
        write_rows(self.root / "val.jsonl", spelling_rows(4))

    def submit(self, name: str, *flags: str, steps: int = 30, **variables) -> list[str]:
        """Submits a run; the ids of its jobs."""
        told = self.told(0, name, *flags, steps=steps, **variables)
        return [line.split()[1].rstrip(":") for line in told.splitlines() if line[:4] == "job "]

    def told(self, status: int, name: str, *flags: str, steps: int = 30, **variables) -> str:
        """What launch/submit.sh prints before it ends with a status."""
        (self.root / "configs/small.py").write_text(SMALL.format(steps=steps))
        given = {"EXP_NAME": name, "CONFIG_PATH": "configs/small.py", "MODEL_PATH": self.model}
        given |= {"TRAIN_PATH": "train.jsonl", "VAL_PATH": "val.jsonl"}
        given |= {"SLURM_PARTITION": "batch", "SLURM_ACCOUNT": "nobody", "SLURM_TIME_LIMIT": "10"}
        given |= {"SBATCH_NUM_NODES": str(len(self.cluster.names)), "GPUS_PER_NODE": "0"}
        given |= {"SAVE_BEFORE": "60", "RESTART_SECONDS": "60"}
        given |= {"NODE_IP": "127.0.0.1", "GRPO_PYTHON": sys.executable}
        env = self.cluster.env | given | variables
        done = ran("bash", "launch/submit.sh", *flags, root=self.root, env=env)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def log(self, name: str) -> str:
        paths = sorted((self.root / "logs" / name).glob("*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in paths)

    def lines(self, name: str, file: str) -> list[dict]:
        path = self.root / "runs" / name / file
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def steps(self, name: str) -> list[int]:
        return [line["step"] for line in self.lines(name, "metrics.jsonl") if "loss" in line]

    def check(self, name: str, steps: int) -> None:
        """Every step once, every slot's group once, its prompt the next one of the file."""
        assert self.steps(name) == list(range(1, steps + 1)), self.log(name)[-4000:]
        rollouts = [r for r in self.lines(name, "rollouts.jsonl") if r["evaluation"] is None]
        counts = Counter((r["slot"], r["row"]) for r in rollouts if r["step"] <= steps)
        assert counts == {(slot, slot % 64 + 1): 4 for slot in range(4 * steps)}
        assert not self.lines(name, "dropped.jsonl")


@pytest.fixture
def home(tmp_path, tiny_model):
    """A cluster of three nodes, and the project on it."""
    subprocess.run(["chmod", "755", tmp_path, *list(tmp_path.parents)[:3]], check=True)
    with slurm(tmp_path, 3) as cluster:
        yield Home(tmp_path, cluster, tiny_model)


def test_a_chain_of_jobs_trains_every_prompt_once(home):
    """Slurm's warning ends the first jobs, the next go on, the last has nothing to do."""
    jobs = home.submit("chain", steps=600, SLURM_TIME_LIMIT="4", SAVE_BEFORE="", JOBS="6")
    assert len(jobs) == 6
    home.cluster.wait(lambda: not home.cluster.jobs(), 1500)
    log = home.log("chain")
    print(log)
    home.check("chain", 600)
    assert "(SIGUSR1); --resume auto continues" in log and "resumed from" in log
    assert "nothing to do: step 600" in log and "Ray cluster: 3 nodes" in log
    states = [home.cluster.run("scontrol", "show", "job", job) for job in jobs]
    assert all("JobState=COMPLETED" in state for state in states)


@pytest.mark.parametrize(
    ("mode", "starts", "state"),
    [("leaves", 1, "COMPLETED"), ("refuses", 1, "FAILED"), ("dies", 3, "FAILED")]
    + [("killed", 3, "FAILED")],
)
def test_a_run_that_fails_starts_again_and_one_that_refuses_or_leaves_does_not(
    home, mode, starts, state
):
    """MAX_RESTARTS is 2. Slurm's warning reaches the driver, and the job ends well."""
    (home.root / "python").write_text(ACTOR)
    (home.root / "python").chmod(0o755)
    (home.root / "logs").mkdir()
    given = {"GRPO_CODE": str(home.root), "GRPO_PYTHON": str(home.root / "python"), "MODE": mode}
    given |= {"NODE_IP": "127.0.0.1", "RESTART_SECONDS": "10"}
    env = home.cluster.env | given
    options = ["--nodes=3", "--time=5", f"--job-name={mode}", "--output=out", "--parsable"]
    command = ["sbatch", *options, "launch/grpo.sbatch"]
    job = subprocess.check_output(command, cwd=home.root, env=env, text=True).strip()
    out = home.root / "out"
    home.cluster.wait(lambda: out.exists() and "the driver starts" in out.read_text(), 60)
    if mode == "leaves":
        home.cluster.run("scancel", "--signal=USR1", "--batch", job)
    home.cluster.wait(lambda: not home.cluster.jobs(), 60)
    told = out.read_text()
    assert told.count("the driver starts") == starts, told
    assert ("saved" in told) == (mode == "leaves")
    assert f"JobState={state}" in home.cluster.run("scontrol", "show", "job", job)


@pytest.mark.parametrize("flags", [[], ["--services.lean", "data/lean"]])
def test_a_sandbox_service_is_on_every_node_and_compiles_lean(home, flags):
    """Beside a run in an image of its own; a Lean that a flag names is left as it is."""
    (home.root / "programs").mkdir()
    srun = home.root / "programs/srun"
    srun.write_text(CONTAINERS.replace("SRUN", shutil.which("srun")))
    (home.root / "python").write_text(ACTOR)
    for program in (srun, home.root / "python"):
        program.chmod(0o755)
    given = {"GRPO_CODE": str(home.root), "GRPO_PYTHON": str(home.root / "python")}
    given |= {"CONTAINER": "run:1", "SANDBOX_CONTAINER": "skills:2", "MODE": "leaves"}
    given |= {"NODE_IP": "127.0.0.1", "PATH": f"{home.root}/programs:{os.environ['PATH']}"}
    options = ["--nodes=3", "--time=5", "--job-name=beside", "--output=out", "--parsable"]
    command = ["sbatch", *options, "launch/grpo.sbatch", "--steps", "7", *flags]
    env = home.cluster.env | given
    job = subprocess.check_output(command, cwd=home.root, env=env, text=True).strip()
    out = home.root / "out"
    home.cluster.wait(lambda: out.exists() and "the driver starts" in out.read_text(), 60)
    serve = home.root / "serve"
    expected = "".join(f"{name} serves at 6000\n" for name in home.cluster.names)
    home.cluster.wait(lambda: "".join(sorted(serve.read_text().splitlines(True))) == expected, 30)
    home.cluster.run("scancel", "--signal=USR1", "--batch", job)
    home.cluster.wait(lambda: not home.cluster.jobs(), 60)
    lean = "" if flags else " --services.lean http://127.0.0.1:6000"
    assert f"looks at {' '.join(['--steps', '7', *flags])}{lean}\n" in out.read_text()
    images = (home.root / "images").read_text().splitlines()
    assert {line.split()[1] for line in images} == {"skills:2", "run:1"}


@pytest.mark.parametrize("what", ["Ray", "all"])
def test_a_node_that_is_killed_costs_a_restart_at_most(home, what):
    """Ray of the trainer's node ends at once, or all of the step there; the job starts it again."""
    home.submit("node", "--save_period", "10", steps=100, SLURM_TIME_LIMIT="20")
    home.cluster.wait(lambda: len(home.steps("node")) >= 3, 240)
    raylet, *actors = trainers(home.root / "runs/node")
    victims = [*ancestors(raylet), raylet, *actors] if what == "all" else [raylet, *actors]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    died, killed = time.monotonic(), len(home.steps("node"))
    home.cluster.wait(lambda: len(home.steps("node")) > killed + 1, 240)
    print(f"{what} killed at step {killed}: goes on {time.monotonic() - died:.0f} s later")
    home.cluster.wait(lambda: not home.cluster.jobs(), 500)
    home.check("node", 100)
    assert "restart 1" in home.log("node")


def trainers(run: Path) -> list[int]:
    """The raylet that has the trainer, and all its processes."""
    (log,) = (path for path in (run / "logs").glob("Trainer-*.log"))
    pid = int(log.stem.rsplit("-", 1)[1])
    raylet = parent(pid)
    children = Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()
    return [pid for pid in [raylet, *map(int, children)] if is_alive(pid)]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def ancestors(pid: int) -> list[int]:
    """The processes above one, up to Slurm's of its step."""
    found = [parent(pid)]
    while "slurmstepd" not in Path(f"/proc/{found[-1]}/comm").read_text():
        found.append(parent(found[-1]))
    return found[::-1]


def test_a_job_shuns_excluded_nodes_and_commands_attach_to_its_cluster(home):
    """They have its token, which is nobody else's to read. Without it Ray answers nobody."""
    programs = home.root / "programs"
    programs.mkdir()
    (programs / "python").write_text(IDLE.replace("PYTHON", sys.executable))
    (programs / "python").chmod(0o755)
    (programs / "ray").symlink_to(Path(sys.executable).with_name("ray"))
    given = {"EXCLUDE_NODES": "n1", "SBATCH_NUM_NODES": "2"}
    given |= {"PYTHONPATH": ""}  # `ray status` asks for all of Ray
    (job,) = home.submit("idle", GRPO_PYTHON=str(programs / "python"), **given)
    home.cluster.wait(lambda: "the driver starts" in home.log("idle"), 120)
    assert " NodeList=n[2-3]" in home.cluster.run("scontrol", "show", "job", job)

    def attached(*command: str) -> subprocess.CompletedProcess:
        words = ["bash", "launch/attach.sh", *command]
        return ran(*words, root=home.root, env=home.cluster.env)

    home.cluster.wait(lambda: " 1 node_" in attached(job, "ray", "status").stdout, 60)
    assert attached(job, "printenv", "SLURMD_NODENAME").stdout == "n2\n"
    assert attached(job, "env", "-u", "RAY_AUTH_TOKEN", "ray", "status").returncode != 0
    folder = home.root / "logs/idle" / job
    assert (folder / "attach").stat().st_mode & 0o777 == 0o600
    home.cluster.run("scancel", "--signal=USR1", "--batch", job)
    home.cluster.wait(lambda: not home.cluster.jobs(), 60)
    late = attached(job, "true")
    assert late.returncode == 1 and f"error: job {job} is " in late.stderr
    assert "expected one that is RUNNING" in late.stderr


def test_what_cannot_run_is_refused_before_it_waits_in_the_queue(home):
    """The reason names the variable, and nothing is submitted."""
    refused = home.told(1, "no", SLURM_PARTITION="nowhere")
    assert "SLURM_PARTITION = 'nowhere'" in refused and "invalid partition" in refused
    late = home.told(1, "no", SLURM_TIME_LIMIT="2", SAVE_BEFORE="60")
    assert "SLURM_TIME_LIMIT = '2': expected more than SAVE_BEFORE = 60 s" in late
    missing = home.told(1, "no", EXP_NAME="", SLURM_ACCOUNT="")
    assert "these variables are missing: EXP_NAME SLURM_ACCOUNT" in missing
    absent = home.told(1, "no", MODEL_PATH="models/none")
    assert "models/none" in absent and "expected a folder" in absent
    assert not home.cluster.jobs()


def test_a_node_that_does_not_come_up_ends_the_job_with_its_log(home):
    """No restart: Ray could not start there ten times."""
    broken = home.root / "python"
    broken.write_text(
        f'#!/bin/bash\n[[ $SLURMD_NODENAME != n3 ]] || {{ echo "no Ray here" && exit 1; }}\n'
        f'exec {sys.executable} "$@"\n'
    )
    broken.chmod(0o755)
    home.submit("broken", GRPO_PYTHON=str(broken))
    home.cluster.wait(lambda: not home.cluster.jobs(), 240)
    log = home.log("broken")
    assert "error: n3 is not part of the Ray cluster:" in log and "no Ray here" in log
    assert "restart" not in log and not home.steps("broken")


def test_judges_and_environments_have_nodes_of_their_own(home):
    """The last one serves a judge, whose address is in a file; the one before it has no trainer."""
    judge = f"general {home.model} 0 --max-model-len 64 --enforce-eager --dtype float32"
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    nodes = {"JUDGE_NODES": "1", "CPU_NODES": "1", "JUDGES": judge, "JUDGE_PORT": "5310"}
    (job,) = home.submit("judged", steps=20, **nodes, **quiet)
    home.cluster.wait(lambda: not home.cluster.jobs(), 400)
    home.check("judged", 20)
    assert "Ray cluster: 2 nodes" in home.log("judged")
    folder = home.root / "logs/judged" / job
    assert (folder / "judges").read_text() == "general http://127.0.0.1:5310/v1\n"


def test_stages_follow_each_other(home):
    """Each from the checkpoint of the one before it; the chain of all is in the last one's file."""
    model = home.model
    stages = ["rlvr1", "rlvr2", "swe1", "rlhf"]
    for name in stages:
        home.submit(name, steps=2, MODEL_PATH=model)
        home.cluster.wait(lambda: not home.cluster.jobs(), 240)
        model = f"runs/{name}/step_000002/hf"
        assert (home.root / model / "complete.json").exists(), home.log(name)[-4000:]
    lines = chain(read(home.root / model))
    print("\n  from ".join(lines))
    assert [line.split(", ")[0].rsplit("/", 1)[-1] for line in lines[-2::-1]] == stages


def test_twenty_clusters_start_at_once_on_one_machine(tmp_path):
    """No port is taken twice, though all begin with the same band of ports."""
    env = os.environ | {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_CPUS_ON_NODE": "1"}
    env |= {"GRPO_PYTHON": sys.executable, "NODE_IP": "127.0.0.1", "CLUSTER_SECONDS": "300"}
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    folders = [tmp_path / str(i) for i in range(20)]
    command = ["bash", "launch/ray_cluster.sh"]
    started = []
    try:
        for folder in folders:
            folder.mkdir()
            started.append(subprocess.Popen([*command, "node", folder], cwd=ROOT, env=env))
        for folder in folders:
            done = ran(*command, "wait", folder, env=env, seconds=600)
            assert done.returncode == 0, done.stdout + done.stderr
        heads = {(folder / "head").read_text() for folder in folders}
        tries = sum(p.read_text().count("try ") for f in folders for p in f.glob("node.*.log"))
        print(f"{len(heads)} clusters, {tries} tries")
        assert len(heads) == 20
    finally:
        for process in started:
            for pid in family(process.pid):
                os.kill(pid, signal.SIGKILL)
            process.wait()


def family(pid: int) -> list[int]:
    """A process and all that it has started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(one for child in children for one in family(int(child)))]
