"""Which processes make a run: flags, JAX_* variables, Slurm, Open MPI, PMI; and which GPUs each of them takes."""

import pytest

from hybrid_jax import cluster
from hybrid_jax.cluster import Group, Member
from hybrid_jax.errors import UserError

ALL = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
SLURM = {
    "SLURM_JOB_ID": "70001",
    "SLURM_STEP_NODELIST": "gpu[007-010]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
    "PMIX_NAMESPACE": "prterun-host-77@1",
}
PMI = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2", "PMI_PORT": "host:4711"}


def find(*arguments, **environment):
    return cluster.find(*arguments, environment=environment)


def test_nothing_asked_for_is_one_process():
    assert find() is None
    assert cluster.find(environment=dict.fromkeys(ALL, " ")) is None
    assert find("127.0.0.1:1", 1, 0) is None
    assert find(**SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None  # srun --pty bash
    # The shell of a batch script, and an allocation's: no step of several tasks.
    assert find(SLURM_JOB_ID="1", SLURM_NTASKS="16", SLURM_PROCID="0", SLURM_LOCALID="0") is None


def test_environment_and_arguments():
    assert find(**ALL) == Group("127.0.0.1:1234", 4, 3)
    assert find("host:9", 2, 0) == Group("host:9", 2, 0)
    assert find("", None, 3, **ALL) == Group("127.0.0.1:1234", 4, 3)  # told twice, the same
    assert find("", None, 0, **ALL | {"JAX_PROCESS_ID": ""}) == Group("127.0.0.1:1234", 4, 0)
    assert find("", None, None, "0,1", **ALL).devices == "0,1"
    assert find(**ALL, JAX_LOCAL_DEVICE_IDS=" 2, 3").devices == "2,3"
    assert find("", None, None, "all", **ALL, JAX_LOCAL_DEVICE_IDS="2").devices == "all"


def test_slurm():
    assert find(**SLURM) == Group(f"gpu007:{61440 + 70001 % 4096}", 4, 2)
    assert find(**SLURM, JAX_COORDINATOR_PORT="5000").address == "gpu007:5000"
    assert find("gpu007:99", None, None, **SLURM) == Group("gpu007:99", 4, 2)
    assert find("gpu007:99", 4, 2, **SLURM) == Group("gpu007:99", 4, 2)  # told twice, the same
    assert find(**SLURM, PMI_SIZE="4", PMI_RANK="2").address.startswith("gpu007:")  # srun --mpi=pmi2


def test_open_mpi_and_pmi():
    found = find(**OPEN_MPI)
    assert (found.count, found.index) == (8, 5) and found.address.startswith("127.0.0.1:6")
    assert found == find(**OPEN_MPI, **SLURM)  # mpirun inside a job: the step's tasks are mpirun's own helpers
    assert found.address == find(**OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0"}).address
    assert found.address != find(**OPEN_MPI | {"PMIX_NAMESPACE": "prterun-host-78@1"}).address
    assert find("n1:9", None, None, **OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}) == Group("n1:9", 8, 5)
    assert (find(**PMI).count, find(**PMI).index) == (2, 1)
    assert find(**PMI, **SLURM).count == 2  # mpiexec inside a job


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("", ""),
        ("node001", "node001"),
        ("node001,host2", "node001 host2"),
        ("node[098-101],host2", "node098 node099 node100 node101 host2"),
        ("node[001,7-8],host2", "node001 node7 node8 host2"),
        ("rack[1-2]node[03-04]-ib,h", "rack1node03-ib rack1node04-ib rack2node03-ib rack2node04-ib h"),
    ],
)
def test_the_hosts_of_a_list(nodes, names):
    assert cluster.host_names(nodes) == names.split()


@pytest.mark.parametrize(
    ("tasks", "distribution", "hosts"),
    [
        ("1(x4)", "", "gpu007 gpu008 gpu009 gpu010"),
        ("1(x4)", "cyclic", "gpu007 gpu008 gpu009 gpu010"),
        ("2,1(x2),3", "", "gpu007 gpu007 gpu008 gpu009 gpu010 gpu010 gpu010"),
        ("2(x4)", "block:cyclic", "gpu007 gpu007 gpu008 gpu008 gpu009 gpu009 gpu010 gpu010"),
        ("2(x4)", "cyclic", ""),
        ("2(x3)", "", ""),
    ],
)
def test_slurm_says_where_each_process_runs(tasks, distribution, hosts):
    count = str(len(hosts.split()) or 8)
    more = {"SLURM_DISTRIBUTION": distribution} if distribution else {}
    found = find(**SLURM | {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_STEP_NUM_TASKS": count} | more)
    assert found.hosts == tuple(hosts.split()) and found.count == int(count)


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (
            ("host:9", None, None),
            {},
            r"--coordinator_address given without --num_processes .*JAX_NUM_PROCESSES.* and --process_id",
        ),
        (("", 2, 0), {}, r"--num_processes, --process_id given without --coordinator_address"),
        (("", None, None), {"JAX_PROCESS_ID": "0"}, r"JAX_PROCESS_ID given without"),
        (("", None, None), {**ALL, "JAX_NUM_PROCESSES": "two"}, r"JAX_NUM_PROCESSES: 'two' is not a whole number"),
        (("", None, None), {**ALL, "JAX_PROCESS_ID": "4"}, r"JAX_PROCESS_ID: must be from 0 to 3"),
        (("", 3, None), ALL, r"^--num_processes is 3, but JAX_NUM_PROCESSES says 4; leave out the one or unset"),
        (("h:1", None, None), ALL, r"^--coordinator_address is h:1, but JAX_COORDINATOR_ADDRESS says 127.0.0.1:1234"),
        (("", 0, None), {}, r"^--num_processes: must be at least 1, not 0$"),
        (("", None, -1), {}, r"^--process_id: must be at least 0, not -1$"),
        (("host:9", -2, 0), {}, r"--num_processes: must be at least 1"),
        (("host", 2, 0), {}, r"--coordinator_address: 'host' is not HOST:PORT"),
        (("host:99999", 2, 0), {}, r"is not HOST:PORT"),
        (("host:9", 2, 0, "0,0"), {}, r"--local_device_ids: '0,0' is not a list of different GPU numbers"),
        (("", None, None), {**ALL, "JAX_LOCAL_DEVICE_IDS": "a"}, r"JAX_LOCAL_DEVICE_IDS: 'a' is not a list"),
        (("", 8, None), SLURM, r"--num_processes is 8, but Slurm says 4 \(SLURM_STEP_NUM_TASKS\); leave out"),
        (("", None, None), {**SLURM, **ALL}, r"JAX_PROCESS_ID is 3, but Slurm says 2 \(SLURM_PROCID\)"),
        (("", None, None), {k: v for k, v in SLURM.items() if k != "SLURM_PROCID"}, r"SLURM_PROCID is not set"),
        (("", None, None), {**SLURM, "JAX_COORDINATOR_PORT": "99999"}, r"JAX_COORDINATOR_PORT: 99999 is no port"),
        (("", None, None), {**SLURM, "SLURM_STEP_NODELIST": ""}, r"Slurm started 4 processes and does not say where"),
        (("", None, 4), OPEN_MPI, r"--process_id is 4, but Open MPI says 5 \(OMPI_COMM_WORLD_RANK\)"),
        (("", None, None), {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, r"Open MPI started 8 processes and"),
        (("", None, None), {**PMI, "MPI_LOCALNRANKS": "1"}, r"PMI started 2 processes .*--coordinator_address=HOST"),
    ],
)  # fmt: skip
def test_wrong_combinations_are_one_line(arguments, environment, said):
    with pytest.raises(UserError, match=said) as caught:
        cluster.find(*arguments, environment=environment)
    assert "\n" not in str(caught.value)


# ---- GPUs ----


def members(count, a_host, gpus, platform="rocm", **named):
    named["platform"] = platform
    made = [Member(f"n{i // a_host}", "boot", 1, "", "", "", gpus) for i in range(count)]
    return [Member(**{**vars(m), **{k: v[i] if isinstance(v, list) else v for k, v in named.items()}})
            for i, m in enumerate(made)]  # fmt: skip


def taken(found):
    return [cluster.local_devices(found, i) for i in range(len(found))]


def test_one_process_a_host_takes_all_its_gpus():
    assert taken(members(2, 1, 8)) == [None, None]


def test_processes_of_a_host_share_its_gpus():
    assert taken(members(16, 8, 8)) == [[i] for i in range(8)] * 2
    assert taken(members(4, 2, 8)) == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2
    # Names may be the same on two machines.
    assert taken(members(2, 2, 8, machine=["a", "b"])) == [None, None]


def test_what_bound_gpus_to_processes_wins():
    assert taken(members(8, 8, 1)) == [None] * 8  # srun --gpus-per-task=1
    bound = members(2, 2, 4, visible=["ROCR_VISIBLE_DEVICES=0,1,2,3", "ROCR_VISIBLE_DEVICES=4,5,6,7"])
    assert taken(bound) == [None, None]
    assert taken(members(2, 2, 8, devices=["3", "all"])) == [[3], None]
    assert taken(members(8, 8, 0, platform="cpu", devices="0")) == [None] * 8


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (members(3, 3, 8), "8 GPUs on n0 do not divide over its 3 processes; start another number of them, or give"),
        (members(2, 1, 1, devices=["0", "7"]), "process 1 on n1 is to take GPU 7, but sees 1 (numbered from 0)"),
        (
            members(4, 2, 8, platform=["rocm", "rocm", "rocm", "cpu"]),
            "the processes do not agree on one (cpu: process 3 (n1); rocm: processes 0-2 (n0, n1))",
        ),
    ],
)
def test_gpus_that_cannot_be_shared_are_one_line_the_same_everywhere(found, said):
    lines = set()
    for index in range(len(found)):
        with pytest.raises(UserError) as caught:
            cluster.local_devices(found, index)
        lines.add(str(caught.value))
    assert len(lines) == 1 and said in lines.pop()


def test_numbers_and_hosts():
    assert cluster.ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert cluster.on_hosts([3], [], 8) == "process 3 of 8"
    assert cluster.on_hosts([0, 1], ["a", "b"]) == "processes 0-1 (a, b)"
    assert cluster.on_hosts(range(6), [f"n{i}" for i in range(6)]) == "processes 0-5 (n0, n1, n2, n3, ...)"
