"""Where a job lives, and the environment of Slurm's programs."""

from pathlib import Path

import pytest

from hpc_rl.slurm import place
from hpc_rl.slurm.place import NoAnswer, Place, asked_clusters, by_place, changed_words, here, is_single, recorded

OF_A_USER = {
    "SLURM_JWT": "token", "SLURM_CONF_SERVER": "ctl:6817", "SLURM_DEBUG_FLAGS": "route",
    "SLURM_SACK_KEY": "/run/key", "SLURM_EXIT_ERROR": "9", "PATH": "/bin", "HOME": "/home/me",
    "SLURM_MPI_TYPE": "pmix", "SLURM_KILL_BAD_EXIT": "1", "SLURM_UNBUFFEREDIO": "1", "SLURM_HINT": "nomultithread",
    "SLURM_STEP_GRES": "none", "SLURM_STEP_KILLED_MSG_NODE_ID": "0", "SLURM_TASK_PROLOG": "/site/prolog",
    "SLURM_WCKEY": "mine", "SLURM_NETWORK": "sn_all", "SLURM_PARTITION": "gpu", "SRUN_EXPORT_ENV": "ALL",
}  # fmt: skip
CHANGING = (
    "SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK", "SLURM_MEM_PER_NODE", "SLURM_CLUSTERS", "SBATCH_CLUSTERS",
    "SLURM_ARRAY_TASK_ID", "SLURM_CLUSTER_NAME", "SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST", "SLURM_CPUS_ON_NODE",
    "SLURM_DISTRIBUTION", "SLURM_EXPORT_ENV", "SLURM_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_GTIDS", "SLURM_JOBID",
    "SLURM_JOB_END_TIME", "SLURM_JOB_NODELIST_HET_GROUP_1", "SLURM_LAUNCH_NODE_IPADDR", "SLURM_LOCALID",
    "SLURM_NNODES", "SLURM_NODELIST", "SLURM_NODEID", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_OVERCOMMIT",
    "SLURM_PRIO_PROCESS", "SLURM_PROCID", "SLURM_PTY_PORT", "SLURM_RESTART_COUNT", "SLURM_RLIMIT_CORE",
    "SLURM_SRUN_COMM_HOST", "SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_SUBMIT_DIR", "SLURM_TASK_PID", "SLURM_TASKS_PER_NODE", "SLURM_THREADS_PER_CORE", "SLURM_TOPOLOGY_ADDR",
    "SLURM_TRES_PER_TASK", "SLURM_UMASK", "SLURM_WORKING_CLUSTER", "SLURMD_NODENAME", "SRUN_DEBUG",
    "SQUEUE_FORMAT", "SQUEUE_STATES", "SQUEUE_USERS", "SQUEUE_SORT", "SACCT_FEDERATION", "SACCT_LOCAL", "SINFO_FORMAT",
    "SINFO_PARTITION", "SCANCEL_INTERACTIVE", "SCANCEL_STATE", "SCANCEL_NAME", "SCONTROL_ALL", "SRUN_CPUS_PER_TASK",
)  # fmt: skip


@pytest.mark.parametrize("name", CHANGING)
def test_a_variable_that_changes_an_answer_reaches_no_program(name: str) -> None:
    found = Place().environment(OF_A_USER | {name: "x"})
    assert found == OF_A_USER | {"SLURM_TIME_FORMAT": "standard", "SLURM_BITSTR_LEN": "0"}


def test_times_have_one_format_whatever_the_user_reads() -> None:
    assert Place().environment({"SLURM_TIME_FORMAT": "relative"})["SLURM_TIME_FORMAT"] == "standard"


@pytest.mark.parametrize("program", ["squeue", "sacct", "scontrol", "scancel", "sinfo", "sbatch", "srun"])
def test_the_cluster_is_an_option_of_each_program(program: str) -> None:
    assert Place("foo").words(program) == ["--clusters=foo"]
    assert Place().words(program) == Place("foo").words("sacctmgr") == []


def test_the_first_variable_that_is_set_chooses_the_cluster() -> None:
    assert asked_clusters({"SLURM_CLUSTERS": "a", "SBATCH_CLUSTERS": "b"}) == "b"
    assert asked_clusters({"SLURM_CLUSTERS": "a", "SBATCH_CLUSTERS": ""}) == "a"
    assert asked_clusters({}) == ""
    assert [is_single(one) for one in ("", "a", "a,b", "all")] == [True, True, False, False]


def conf(folder: Path, name: str, cluster: str) -> str:
    path = folder / name
    path.write_text(f"# a cluster\nclustername = {cluster}\nSlurmctldHost=ctl\n")
    return str(path)


def test_a_job_is_looked_up_where_it_was_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = conf(tmp_path, "first.conf", "First"), conf(tmp_path, "other.conf", "other")
    monkeypatch.setattr(place, "DEFAULT_FILES", (other,))
    facts = {"place": here({"SLURM_CONF": first, "SLURM_CLUSTERS": "foo"}).record()}
    assert facts["place"] == {"cluster": "foo", "slurm_conf": first, "conf_server": "", "cluster_name": "first"}
    for now in ({"SLURM_CONF": other}, {}, {"SLURM_CONF": first}, {"SLURM_CLUSTERS": "bar"}):
        found = recorded(facts, now)
        assert found.cluster == "foo" and found.environment(now)["SLURM_CONF"] == first
    in_default = {"place": here({}).record()}
    assert "SLURM_CONF" not in recorded(in_default, {}).environment({"SLURM_CONF": first})
    served = {"place": here({"SLURM_CONF_SERVER": "ctl"}).record()}
    assert recorded(served, {}).environment({})["SLURM_CONF_SERVER"] == "ctl"


def test_a_configuration_of_another_machine_is_found_by_the_name_of_its_cluster_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, login = conf(tmp_path, "cache.conf", "first"), conf(tmp_path, "login.conf", "first")
    other = conf(tmp_path, "other.conf", "other")
    monkeypatch.setattr(place, "DEFAULT_FILES", ())
    job = recorded({"place": here({"SLURM_CONF": cache}).record()}, {})
    Path(cache).unlink()
    assert job.environment({"SLURM_CONF": login})["SLURM_CONF"] == login
    with pytest.raises(
        NoAnswer, match=f"submitted with SLURM_CONF={cache}, which is not on this machine.*cluster first"
    ):
        job.environment({"SLURM_CONF": other})
    with pytest.raises(NoAnswer):
        job.environment({})
    monkeypatch.setattr(place, "DEFAULT_FILES", (login,))
    assert "SLURM_CONF" not in job.environment({})


def test_a_job_without_a_record_is_in_the_local_cluster() -> None:
    assert recorded({"job_id": "7"}, {"SLURM_CLUSTERS": "foo"}).cluster == ""
    assert recorded({"place": "foo"}, {}).cluster == ""


def test_jobs_are_grouped_by_their_place() -> None:
    a, b = Place("a"), Place("b")
    assert by_place([("1", a), ("2", b), ("3", a)]) == {a: ["1", "3"], b: ["2"]}


def test_only_what_differs_is_changed_and_no_secret_is_on_a_command_line() -> None:
    wanted = {"SLURM_JWT": "secret", "SLURM_TIME_FORMAT": "standard", "A": "1"}
    words = changed_words({"SLURM_JWT": "secret", "SLURM_NTASKS": "2", "A": "1"}, wanted)
    assert words == ["-u", "SLURM_NTASKS", "SLURM_TIME_FORMAT=standard"]
