"""Drivers for jobs in tests, and an intruder, as the text of programs."""

LOOK = """
import json, os, pathlib, sys, ray
ray.init()
@ray.remote(num_cpus=1)
def look():
    names = ("http_proxy", "NCCL_DEBUG", "VLLM_LOGGING_LEVEL", "TMPDIR", "RAY_AUTH_MODE")
    return {"node": os.uname().nodename, **{name: os.environ.get(name) for name in names}}
nodes = [node for node in ray.nodes() if node["Alive"]]
tasks = [look.options(resources={f"node:{node['NodeManagerAddress']}": 0.1}).remote() for node in nodes]
seen = {"nodes": [node["Resources"] for node in nodes], "proxy": os.environ["http_proxy"], "arguments": sys.argv[1:]}
seen["tasks"] = ray.get(tasks)
pathlib.Path("seen.json").write_text(json.dumps(seen))
print("the driver is done")
sys.exit(3)
"""
"""Records what it sees and exits with code 3."""

WAIT = """
import os, pathlib, sys, time, ray
ray.init(logging_level="error")
@ray.remote(num_cpus=1)
def hold():
    time.sleep(600)
held = hold.remote()
mark = pathlib.Path(sys.argv[1])
mark.with_suffix(".partial").write_text(os.environ["RAY_ADDRESS"])
mark.with_suffix(".partial").rename(mark)
while not mark.with_suffix(".end").exists():
    time.sleep(0.1)
print("nodes at the end:", len([node for node in ray.nodes() if node["Alive"]]))
"""
"""Keeps a task running, writes its address to a file, and waits for a file that asks it to end."""

COUNT = """
import ray
ray.init(logging_level="error")
print("nodes:", len([node for node in ray.nodes() if node["Alive"]]), ray.cluster_resources()["CPU"])
"""

INTRUDER = """
import json, os, pathlib, socket, subprocess, sys, tempfile, urllib.error, urllib.request
address, dashboard_port, *private = sys.argv[1:]
found, home = {}, tempfile.mkdtemp()
settings = {"no token": {"RAY_AUTH_MODE": "disabled"}, "wrong token": {"RAY_AUTH_TOKEN": "f" * 64}}
commands = {
    "connect": ["-c", f"import ray; ray.init({address!r}); print(ray.nodes())"],
    "join": ["-m", "ray.scripts.scripts", "start", f"--address={address}", f"--temp-dir={home}/ray"],
}
plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
plain |= {"HOME": home, "RAY_TMPDIR": home, "TMPDIR": home, "RAY_NUM_REDIS_GET_RETRIES": "1"}
running = {}
for token, setting in settings.items():
    for what, command in commands.items():
        environ = {**plain, "RAY_AUTH_MODE": "token", **setting}
        running[f"{what} with {token}"] = subprocess.Popen(
            [sys.executable, *command], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
for where in ("127.0.0.1", address.split(":")[0]):
    job = urllib.request.Request(f"http://{where}:{dashboard_port}/api/jobs/", data=b'{"entrypoint": "id"}')
    try:
        found[f"submit to {where}"] = urllib.request.urlopen(job, timeout=300).status
    except urllib.error.HTTPError as error:
        found[f"submit to {where}"] = error.code
    except OSError:
        found[f"submit to {where}"] = "refused"
for path in private:
    try:
        found[f"read {path}"] = os.listdir(path) if os.path.isdir(path) else pathlib.Path(path).read_text()
    except OSError as error:
        found[f"read {path}"] = type(error).__name__
with socket.create_connection((address.split(":")[0], int(address.split(":")[1]) + 1), timeout=300) as call:
    call.sendall(b"up\\nend 0\\n")
    found["roll call"] = call.recv(100).decode()
for what, process in running.items():
    output = process.communicate(timeout=600)[0]
    found[what] = "in" if process.returncode == 0 else output[-2000:]
subprocess.run(["rm", "-rf", home])
print(json.dumps(found))
"""
"""Tries to enter a cluster as another user.

Arguments: the address of a cluster, the port of its dashboard, and paths to read. Prints the outcomes.
"""
