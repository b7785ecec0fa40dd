"""slurmdbd with a database that lives in the controller's own /tmp, so that `sacct` works."""

from tests.sandbox.network import CONTROLLER
from tests.sandbox.spec import Spec

DATABASE = "/tmp/mariadb"  # inside the controller's mount namespace, where no other sandbox sees it
SYSTEM_TABLES = "/usr/share/m*/m*_system_tables.sql"  # named after MySQL or MariaDB, by its version


def slurmdbd_conf(spec: Spec, subnet: str) -> str:
    base = spec.base
    lines = [
        "AuthType=auth/munge",
        f"AuthInfo=socket={base}/run/munge.socket",
        "DbdHost=ctl",
        f"DbdAddr={subnet}.{CONTROLLER}",
        "SlurmUser=root",
        f"PidFile={base}/run/slurmdbd.pid",
        f"LogFile={base}/log/slurmdbd.log",
        "StorageType=accounting_storage/mysql",
        "StorageHost=127.0.0.1",  # by TCP: an address in the controller's network namespace
        "StorageUser=root",
        "StorageLoc=slurm_acct_db",
    ]
    return "\n".join([*lines, ""])


def daemon_commands(spec: Spec, subnet: str) -> list[str]:
    """Return the shell commands that the controller runs before slurmctld. A daemon that ends ends them."""
    # No grant tables: creating them would take most of the start-up time, and the database holds nothing else.
    options = (
        f"--no-defaults --user=root --datadir={DATABASE} --skip-grant-tables --innodb-log-file-size=8M"
        " --innodb-buffer-pool-size=32M --innodb-flush-log-at-trx-commit=0 --performance-schema=OFF"
    )
    network = f"--bind-address=127.0.0.1 --socket={DATABASE}/socket --pid-file={DATABASE}/pid"
    log = f">>{spec.base}/log/mariadbd.log 2>&1"
    return [
        f"mkdir -p {DATABASE}/mysql",
        # slurmdbd reads associations with a stored procedure, which needs the system tables.
        f"(echo 'USE mysql;'; cat {SYSTEM_TABLES}) | mariadbd {options} --bootstrap {log}",
        *_started(f"mariadbd {options} {network}", "127.0.0.1/3306", f"{spec.base}/log/mariadbd.log"),
        # .ci/install-slurm-new puts a client library there: with that of MariaDB 11.8.9, slurmdbd ends (error 5027).
        *_started(
            "env LD_LIBRARY_PATH=/usr/lib/hpc-rl slurmdbd -D",
            f"{subnet}.{CONTROLLER}/6819",
            f"{spec.base}/log/slurmdbd.log",
        ),
        f"sacctmgr --immediate add cluster {spec.name}",
        *_associations(spec),
    ]


def _started(daemon: str, port: str, log: str) -> list[str]:
    """Return the commands that start a daemon and wait for its port. If it ends, its last lines are printed at once."""
    return [
        f"{daemon} >>{log} 2>&1 &",
        f"until (: </dev/tcp/{port}) 2>/dev/null; do kill -0 $! || {{ tail -n 5 {log}; exit 1; }}; sleep 0.1; done",
    ]


def _associations(spec: Spec) -> list[str]:
    commands = []
    for account in dict.fromkeys(account for accounts in spec.accounts.values() for account in accounts):
        commands.append(f"sacctmgr --immediate add account {account} Cluster={spec.name}")
    if spec.qos:
        commands.append(f"sacctmgr --immediate add qos {','.join(spec.qos)}")
    for user, accounts in spec.accounts.items():
        which = f"Account={','.join(accounts)} DefaultAccount={accounts[0]} Cluster={spec.name}"
        commands.append(f"sacctmgr --immediate add user {user} {which}")
        if spec.qos:
            commands.append(f"sacctmgr --immediate modify user {user} set qos+={','.join(spec.qos)}")
    return commands
