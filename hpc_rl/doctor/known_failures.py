"""The failures of this field that are known by their messages: cause and fix of each.

docs/troubleshooting.md has a section of the same title on every one. What stands earlier explains what stands later: a
process that was killed for lack of memory leaves the others waiting until their time is over.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class KnownFailure:
    title: str
    patterns: tuple[str, ...]
    """Parts of a line, in the words of the program that says it; a * stands for anything."""
    cause: str
    fix: str
    over: float | None = None
    """Where a number follows that may be harmless: the bound above which it is not."""

    @property
    def anchor(self) -> str:
        """Of its section in the documentation, as GitHub makes it of a title."""
        return re.sub(r"[^\w\- ]", "", self.title.lower()).replace(" ", "-")


KNOWN_FAILURES = (
    KnownFailure(
        "Killed for lack of memory",
        (
            "Detected * oom-kill event",
            "Detected * oom_kill event",
            "srun: error: *: Out Of Memory",
            "Exceeded job memory limit",
            "Exceeded step memory limit",
            "state OUT_OF_MEMORY",
        ),
        "the job used more memory on a node than it was granted (--mem), and the kernel killed a process; shared "
        "memory (/dev/shm, Ray's object store) counts too",
        "ask for more (--mem), or hold less: trainer.sharding=full, a smaller ray.object_store_gb, fewer "
        "reward.workers",
    ),
    KnownFailure(
        "Killed by Ray's memory monitor",
        (
            "killed due to the node running low on memory",
            "Workers (tasks / actors) killed due to memory pressure",
            "ray.exceptions.OutOfMemoryError",
        ),
        "Ray ends workers when a node's memory is nearly used up, before the kernel does",
        "ask for more (--mem), or hold less per node; slurm.env.RAY_memory_usage_threshold=0.98 moves the bound",
    ),
    KnownFailure(
        "CUDA out of memory",
        (
            "CUDA out of memory",
            "CUDA error: out of memory",
            "No available memory for the cache blocks",
            "HIP out of memory",
        ),
        "a GPU's memory is used up: model, optimizer, activations and the engine's cache do not fit together",
        "lower trainer.micro_tokens, set model.enable_gradient_checkpointing=true, lower "
        "rollout.gpu_memory_utilization, or use more GPUs",
    ),
    KnownFailure(
        "Disk quota exceeded",
        ("Disk quota exceeded", "[Errno 122]"),
        "your quota on a file system is used up: by size or by number of files; often that of the home folder",
        "remove old checkpoints, put runs on a scratch file system (--run-dir), and caches too (cache.hf_home, "
        "slurm.env.TRITON_CACHE_DIR)",
    ),
    KnownFailure(
        "No space left on device",
        ("No space left on device", "[Errno 28]"),
        "a file system is full: the run directory's, the node's /tmp, or /dev/shm",
        "make room; set slurm.env.TMPDIR to a larger local disk; lower trainer.max_ckpt_to_keep",
    ),
    KnownFailure(
        "Shared memory too small",
        (
            "insufficient shared memory",
            "unable to open shared memory",
            "unable to allocate shared memory",
            "unable to resize shared memory",
            "Ray's object store would get",
            "Bus error",
        ),
        "/dev/shm is smaller than what Ray or data loaders keep there",
        "ask for more --mem; in a container bind the host's /dev/shm; set ray.object_store_gb",
    ),
    KnownFailure(
        "Walltime reached",
        ("DUE TO TIME LIMIT", "state TIMEOUT"),
        "Slurm ended the job at its time limit before it had saved: it was not told, or saving took longer than "
        "slurm.warning_s",
        "raise slurm.warning_s above the time of a checkpoint, or --time; submitted again, the run goes on",
    ),
    KnownFailure(
        "Preempted",
        ("DUE TO PREEMPTION", "state PREEMPTED"),
        "a job of higher priority took the nodes",
        "submit again: it goes on from its last checkpoint; save more often (trainer.save_minutes), or use another "
        "partition or QOS",
    ),
    KnownFailure(
        "A node failed",
        ("DUE TO NODE FAILURE", "state NODE_FAIL", "is lost: it has not answered", "Node failure on "),
        "a node of the job crashed, or lost its network",
        "submit again: it goes on from its last checkpoint; leave out a node that fails again (--sbatch exclude=NODE)",
    ),
    KnownFailure(
        "Stopped before the end",
        ("state STOPPED", "saved before the *; job * is queued again"),
        "the run was asked to stop (`hpc-rl stop`, `requeue`, or the walltime's warning), saved, and left with code 75",
        "nothing is wrong: submit it again by its name, and it goes on",
    ),
    KnownFailure(
        "The nodes do not share the folder",
        (
            "does not see *, which node * made",
            "does not see the folder that the job was submitted from",
            "cannot write the run directory",
            "cannot write into /",
            "files of other nodes arrive late or never",
        ),
        "the run directory, or the folder that you submitted from, is on a disk of one machine",
        "work on a file system that all nodes see, or give --run-dir; `hpc-rl doctor --on-nodes 2` checks it",
    ),
    KnownFailure(
        "Python is missing on the nodes",
        ("has no * (slurm.python)", "ModuleNotFoundError: No module named"),
        "the nodes do not see the Python of the login node, or it lacks a package there",
        "install into an environment on a shared file system; name it as slurm.python, its modules in slurm.modules",
    ),
    KnownFailure(
        "A library is too old",
        (
            "version `GLIBC*' not found",
            "version `CXXABI*' not found",
        ),
        "a package was built for a newer Linux than the nodes have",
        "use packages of the cluster, a newer compiler module (GLIBCXX), or a container",
    ),
    KnownFailure(
        "The container's files have gone",
        ("Transport endpoint is not connected",),
        "the process that serves a container's file system was killed, usually by a signal sent to the whole step",
        "unpack the image (`hpc-rl image unpack`), so that no process serves it",
    ),
    KnownFailure(
        "An interface without an address",
        ("interface * has no IPv4 address on", "no route from * to node", "no socket interface found"),
        "slurm.interface names an interface that a node does not have, or nothing routes between the nodes",
        "`hpc-rl doctor --on-nodes 2` lists the interfaces: set slurm.interface to one that all nodes have",
    ),
    KnownFailure(
        "A port is taken",
        (
            "are occupied on *: something uses port",
            "no * free TCP ports",
            "no free TCP port",
            "EADDRINUSE",
            "Address already in use",
            "address already in use",
        ),
        "another program listens on the port: a job of yours on the same node, or ports that a script fixed",
        "leave out ray.first_port and MASTER_PORT: hpc-rl finds free ports by the job's id",
    ),
    KnownFailure(
        "Fewer GPUs than asked for",
        ("grants * GPUs, and trainer.n_gpus_per_node is",),
        "Slurm granted fewer GPUs on a node than trainer.n_gpus_per_node, or CUDA_VISIBLE_DEVICES was changed",
        "ask for them as this cluster wants it (--gpus-per-node; slurm.gpu_option, slurm.gpu_type)",
    ),
    KnownFailure(
        "The temporary folder's path is too long",
        ("over the * of a UNIX socket's path", "AF_UNIX path "),
        "paths of UNIX sockets end at 107 bytes, and Ray's are long already",
        "set a short one: slurm.env.TMPDIR=/tmp",
    ),
    KnownFailure(
        "Too many open files",
        ("Too many open files", "too many open files", "[Errno 24]"),
        "the limit on open files is low: Ray opens one for each connection",
        "raise it in slurm.setup (ulimit -n 65535), or have the hard limit raised",
    ),
    KnownFailure(
        "The NVIDIA driver is too old",
        ("NVIDIA driver on your system is too old", "CUDA driver version is insufficient for CUDA runtime version"),
        "torch was built for a newer CUDA than the driver of the nodes runs",
        "install a build of torch for an older CUDA; CUDA 12 needs driver 525, CUDA 13 needs 580",
    ),
    KnownFailure(
        "No kernel for this GPU",
        ("no kernel image is available for execution on the device",),
        "torch, vLLM or another library was built without code for this kind of GPU: too new for it, or too old",
        "install a build that has it, or ask for another kind of GPU (--constraint, slurm.gpu_type)",
    ),
    KnownFailure(
        "No GPU is visible",
        (
            "No CUDA GPUs are available",
            "Found no NVIDIA driver on your system",
            "Torch not compiled with CUDA enabled",
            "CUDA-capable device(s) is/are busy or unavailable",
        ),
        "the job got no GPU, the container does not pass them on, or torch is a build for CPUs",
        "ask for GPUs (--gpus-per-node); for AMD's in a container container.gpu=rocm; or set trainer.device=cpu",
    ),
    KnownFailure(
        "Illegal memory access in a rollout",
        ("an illegal memory access was encountered",),
        "a kernel read or wrote where it must not: nearly always a bug of the engine's attention or graph kernels in "
        "this version, for this model and GPU",
        "rollout.engine_kwargs.enforce_eager=true, then rollout.engine_kwargs.disable_cascade_attn=true; another "
        "version of vLLM; slurm.env.CUDA_LAUNCH_BLOCKING=1 names the kernel",
    ),
    KnownFailure(
        "Triton compile_module_from_src",
        ("compile_module_from_src", "Failed to find C compiler", "fatal error: Python.h: No such file"),
        "Triton compiles a small C module on the node, and finds no compiler, no Python headers or no libcuda there",
        "load a compiler (slurm.modules=[gcc]), install Python's headers, or model.use_torch_compile=false",
    ),
    KnownFailure(
        "TensorDict membership",
        ("TensorDict does not support membership checks",),
        "tensordict is too old to answer `key in tensordict`; on aarch64 pip falls back to 0.1.2, since wheels begin "
        "with 0.8",
        "pip install 'tensordict>=0.8'",
    ),
    KnownFailure(
        "rollout_probs_diff too high",
        ("rollout_probs_diff_mean",),
        "the engine's probabilities are not the trainer's, so that the policy learns from samples of another one: "
        "below 0.005 is usual, above 0.01 is not",
        "rollout.engine_kwargs.disable_cascade_attn=true (vLLM up to 0.10.2, on GPUs other than Hopper); the same "
        "dtype on both sides (rollout.dtype); algorithm.tis_cap=2 weights what remains",
        over=0.01,
    ),
    KnownFailure(
        "A model or data set is not in the cache",
        (
            "We couldn't connect to 'http",
            "OfflineModeIsEnabled",
            "LocalEntryNotFoundError",
            "cannot load the data set",
            "Cannot reach http*: offline mode",
        ),
        "the nodes have no internet, or HF_HUB_OFFLINE is set, and the cache that they see lacks it",
        "fetch it on the login node first (hpc-rl fetch), into a cache that the nodes share (cache.hf_home)",
    ),
    KnownFailure(
        "Unable to register worker with raylet",
        ("nable to register worker with raylet", "Failed to register worker * Raylet"),
        "Ray believed in more CPUs or memory than Slurm grants, and started so many workers that they could not answer "
        "in time; or a worker was killed",
        "start Ray by hpc-rl, which tells it what the cgroup grants; in your own scripts ray start --num-cpus and "
        "ray.init(num_cpus=...)",
    ),
    KnownFailure(
        "Ray refuses a token",
        (
            "InvalidAuthToken",
            "Ray couldn't find an authentication token",
            "which anybody on the network could use",
            "no authentication token was found",
        ),
        "a process has no token, or that of another cluster: ~/.ray/auth_token turns tokens on for a head alone",
        "set RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH alike for every process, as hpc-rl does; remove RAY_AUTH_TOKEN",
    ),
    KnownFailure(
        "A placement group times out",
        (
            "lacement group creation timed out",
            "Cannot provide a placement group",
            "Waiting for creating a placement group of specs for",
            "number of available * in the placement group",
            "imed out waiting for placement group",
            "imeout waiting for placement group",
            "pool *: Ray did not reserve",
            "pool * needs * the cluster has",
        ),
        "what was asked of Ray does not fit its nodes: a bundle is larger than a node, or others hold a part",
        "compare trainer.nnodes x n_gpus_per_node and pools.spec with what the message says that there is; each GPU of "
        "a pool takes a CPU too",
    ),
    KnownFailure(
        "Ray does not come up",
        (
            "Ray is not up after",
            "has not joined Ray after",
            "Ray's * ended with exit code",
            "Ray's * was killed (signal",
        ),
        "a node's Ray processes did not start, or ended; the lines below the message are its log",
        "read that log (attempt-K/ray/nodeN); a slow file system: raise ray.start_timeout_s",
    ),
    KnownFailure(
        "Nodes did not start",
        (
            "did not start within * s",
            "node * has not started",
            "waited * for node * to publish its address",
        ),
        "a node's task never began, or ended at once: its Python, its folder or the node itself",
        "read the node's own log in attempt-K; raise slurm.start_timeout_s where Python starts slowly",
    ),
    KnownFailure(
        "Ray refuses connections",
        (
            "Failed to connect to GCS",
            "Unable to connect to GCS",
            "Failed to get cluster ID from GCS",
            "Could not find any running Ray instance",
        ),
        "nothing listens at Ray's address: the head has ended or is not up yet, or it gave the nodes an address that "
        "they cannot reach",
        "look for the head's end in node0.log; several networks: slurm.interface; unset http_proxy for Ray",
    ),
    KnownFailure(
        "Nodes cannot reach each other",
        (
            "cannot reach node * at",
            "onnectFullMesh failed",
            "The client socket has timed out",
            "Connect to * failed : ",
            "No route to host",
        ),
        "a firewall between the nodes, or the network of another interface",
        "set slurm.interface; `hpc-rl doctor --on-nodes 2` tries it; ask which ports are open (ray.first_port)",
    ),
    KnownFailure(
        "A process was killed",
        ("killed, usually for lack of memory", "srun: error: *: Killed", "exitcode: -9 ", "signal 9 (SIGKILL)"),
        "something ended a process by SIGKILL: mostly the kernel for lack of memory, where Slurm could not see it, or "
        "Slurm itself",
        "ask for more memory (--mem) first; `dmesg` on the node, or the cluster's staff, can tell",
    ),
    KnownFailure(
        "NCCL times out",
        (
            "Watchdog caught collective operation timeout",
            "watchdog got stuck for",
            "Timed out waiting * for recv operation",
            "Timed out waiting * for send operation",
            "ncclSystemError",
            "ncclRemoteError",
            "ncclInternalError",
        ),
        "ranks waited for one that had died, hung or took another path through the program; it is seldom NCCL itself",
        "find the rank that is missing: the first error in time of any rank is the cause; NCCL_DEBUG=INFO and the "
        "doctor's all-reduce tell about the network",
    ),
    KnownFailure(
        "A process of the job has gone",
        (
            "ActorDiedError",
            "WorkerCrashedError",
            "Worker exit type: SYSTEM_ERROR",
            "Connection closed by peer",
            "Connection reset by peer",
            "is lost: its processes ended",
            "Raylet is terminated",
        ),
        "others noticed that a process had ended; why it did stands elsewhere, earlier",
        "read the logs of the node that is named (attempt-K/nodeN*, attempt-K/ray/nodeN), the oldest error first",
    ),
)
